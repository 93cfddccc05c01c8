"""Small checkpoint folders of one base, for tests that merge them."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from reframe_vl.checkpoint.merge import MergeSettings, merge_checkpoints
from tiny import tiny_model, tokenizer


def base_folder(path, family="qwen3_vl", dtype=torch.float32, tied=False, shards=1):
    """A complete checkpoint folder of a tiny model."""
    model = tiny_model(family).base.to(dtype)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=total if shards == 1 else total // shards)
    tokenizer().save_pretrained(path)
    settings = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings |= {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    (path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    return path


def weights(folder):
    """All tensors of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def changed(base, path, edit):
    """A copy of a folder, its weights being what ``edit`` returns for each name and tensor."""
    path.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
            continue
        made = {}
        for name, tensor in load_file(file).items():
            made |= edit(name, tensor)
        save_file({n: t.contiguous() for n, t in made.items()}, path / file.name, {"format": "pt"})
    return path


def specialist(base, path, seed):
    """A copy of a folder whose weights have moved a little."""
    generator = torch.Generator().manual_seed(seed)

    def move(name, tensor):
        noise = torch.randn(tensor.shape, generator=generator)
        return {name: (tensor.float() + 0.05 * noise).to(tensor.dtype)}

    return changed(base, path, move)


def merged(folders, output, **settings):
    """The weights of the merge of a base, which comes first, and checkpoints of it."""
    base, *checkpoints = folders
    merge_checkpoints(base, checkpoints, output, MergeSettings(**settings))
    return weights(output)


def bits(tensor):
    """A tensor's bytes, by which zeros of two signs differ."""
    return tensor.contiguous().view(torch.uint8)


def load_report(folder):
    """What transformers finds missing, unexpected or unfit in a folder."""
    _, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    return {what: names for what, names in report.items() if names}


def keep(name, tensor):
    """An edit that changes nothing."""
    return {name: tensor}
