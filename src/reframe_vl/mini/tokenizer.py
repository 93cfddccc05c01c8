"""The mini model's own tokenizer: the Qwen chat layout's special tokens, and few tokens a turn.

A byte-level BPE learned from the mini worlds' own texts. The fixed pieces of a tool call are
added tokens, so that a call takes 12 tokens and a two-turn rollout about 70; any other text still
works byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reframe_vl.mini.glyphs import COLOR_NAMES, NUM_DIGITS

PAD = "<|pad|>"
END_OF_TURN = "<|im_end|>"

SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

TAG_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<answer>",
    "</answer>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Single tokens, but not *special*: as in Qwen's tokenizers, decoding never hides them."""

CHUNK_TOKENS = (
    '{"name":"CropImage","arguments":{"bbox_2d":[',
    '{"name":"SelectFrames","arguments":{"frames":[',
    "]}}",
    "What digit is on the",
    " square?",
    ".0 seconds>",
    "system\n",
    "user\n",
    "assistant\n",
    "\n",
)

COORDINATES = tuple(range(0, 1001, 125))
SMALL_INTEGERS = tuple(range(17))

CHAT_TEMPLATE = """\
{%- macro content(parts) -%}
{%- if parts is string -%}{{ parts }}{%- else -%}
{%- for part in parts -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + content(message.content) }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + content(message.content) + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The codec's layout; a call stands as text in the assistant's content."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; it draws nothing at random."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+|\s?[^\s\d]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in (*TAG_TOKENS, *CHUNK_TOKENS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> Iterator[str]:
    """Every word that is to be one token; pieces and numbers are learned whole."""
    yield from (f" {color}" for color in COLOR_NAMES)
    yield from map(str, (*COORDINATES, *SMALL_INTEGERS, *range(NUM_DIGITS)))
