"""Tiny releases in the form of the published ones; every word and picture in them is ours."""

import base64
import csv
import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from reframe_vl.data.report import Report
from reframe_vl.evaluation.benchmarks import BENCHMARKS
from reframe_vl.evaluation.releases.media import MediaStore

INSTRUCTION = "Answer with the option's letter from the given choices directly."


def picture(shade=100, size=(40, 30)):
    stream = BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), shade, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def in_base64(shade=100, size=(40, 30)):
    # As large as real ones are: longer than any name of a file.
    noise = np.random.default_rng(shade).integers(0, 255, (size[1], size[0], 3), np.uint8)
    stream = BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_table(path, rows, delimiter="\t"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = csv.DictWriter(stream, names, delimiter=delimiter)
        table.writeheader()
        table.writerows(rows)
    return path


def write_image(path, shade=100, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(shade, size))


def write_video(path):
    """A name is enough where no frame is looked at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def vstar(folder):
    rows = []
    for number, (category, label) in enumerate(
        [("direct_attributes", "B"), ("direct_attributes", "A"), ("relative_position", "B")]
    ):
        write_image(folder / category / f"{number}.png", 50 + number)
        rows.append(
            {
                "image": f"{category}/{number}.png",
                "text": f"What colour is thing {number}?\n(A) red\n(B) light blue\n{INSTRUCTION}",
                "category": category,
                "label": label,
                "question_id": str(number),
            }
        )
    write_lines(folder / "test_questions.jsonl", rows)


def hr_bench_4k(folder, name="hr_bench_4k.tsv"):
    texts = ["one", "two", "three", "four"]
    rows = []
    for question, category in enumerate(["single", "cross"]):
        image = in_base64(question + 1)
        for cycle in range(4):
            turned = texts[cycle:] + texts[:cycle]
            rows.append(
                {
                    "index": question * 4 + cycle,
                    "question": f"How many at {question}?",
                    "answer": "ABCD"[turned.index("two")],
                    "category": category,
                    **dict(zip("ABCD", turned, strict=True)),
                    "cycle_category": cycle,
                    "image": image,
                }
            )
    write_table(folder / name, rows)


def hr_bench_8k(folder):
    hr_bench_4k(folder, "hr_bench_8k.tsv")


def visual_probe(folder):
    for level in ("Easy", "Medium", "Hard"):
        write_image(folder / f"VisualProbe_{level}" / "data" / f"{level}.png")
        row = {
            "images": [f"data/{level}.png"],
            "doc_id": 7,
            "problem": "<image>\nWhat stands on the sign?",
            "solution": f"{level} Street",
            "data_source": f"visual_probe_{level.lower()}",
        }
        write_json(folder / f"VisualProbe_{level}" / "val.json", [row])


def mme_realworld_lite(folder):
    choices = ["(A) 13", "(B) 90", "(C) 77", "(D) 6", "（E）The image does not feature it"]
    write_image(folder / "imgs" / "a.jpg")
    row = {
        "Question_id": "perception/monitoring/vehicle/counting/0310",
        "Image": "imgs/a.jpg",
        "Text": "How many lorries are there?",
        "Question type": "Multiple Choice",
        "Answer choices": choices,
        "Ground truth": "D",
        "Category": "vehicle/counting",
        "Subtask": "Monitoring",
        "Task": "Perception",
    }
    reasoning = row | {"Question_id": "reasoning/1", "Task": "Reasoning", "Ground truth": "A"}
    write_json(folder / "MME-RealWorld-Lite.json", [row, reasoning])


def treebench(folder):
    rows = [
        {
            "index": "0",
            "image": in_base64(3),
            "question": "What is the cup made of?",
            "multi-choice options": "A. glass\nB. wood\nC. steel\nD. paper",
            "answer": "B",
            "category": "Perception/Material",
            "target_instances": "[[4, 3, 20, 15], [22, 10, 36, 28]]",
        },
        {
            "index": "1",
            "image": in_base64(4),
            "question": "What does the sign say? Options:\nA. GO\nB. STOP",
            "multi-choice options": "",
            "answer": "A",
            "category": "Perception/OCR",
            "target_instances": "[[0, 0, 10, 10]]",
        },
    ]
    write_table(folder / "TreeBench.tsv", rows)


def cv_bench(folder):
    def row(idx, kind, source, task, answer):
        return {
            "idx": idx,
            "type": kind,
            "task": task,
            "image": {"bytes": picture(60 + idx), "path": None},
            "question": "How many chairs are there?",
            "choices": ["1", "2", "3"],
            "answer": answer,
            "source": source,
        }

    two = [row(0, "2D", "ADE20K", "Count", "(B)"), row(1, "2D", "COCO", "Relation", "(A)")]
    write_parquet(folder / "test_2d.parquet", two)
    write_parquet(folder / "test_3d.parquet", [row(2, "3D", "Omni3D", "Depth", "(C)")])


def video_mme(folder):
    write_video(folder / "data" / "fFjv93ACGo8.mp4")
    rows = [
        {
            "video_id": "001",
            "duration": duration,
            "domain": "Knowledge",
            "sub_category": "History",
            "videoID": "fFjv93ACGo8",
            "question_id": f"001-{number}",
            "task_type": "Counting Problem",
            "question": "How many candles burn?",
            "options": ["A. 1.", "B. 4.", "C. 2.", "D. 3."],
            "answer": "C",
        }
        for number, duration in enumerate(("short", "long"), 1)
    ]
    write_parquet(folder / "videomme" / "test-00000-of-00001.parquet", rows)


def longvideobench(folder):
    write_video(folder / "videos" / "86CxyhFV9MI.mp4")
    row = {
        "id": "86CxyhFV9MI_0",
        "video_id": "86CxyhFV9MI",
        "video_path": "86CxyhFV9MI.mp4",
        "subtitle_path": "86CxyhFV9MI_en.json",
        "starting_timestamp_for_subtitles": 0,
        "duration": 190.16,
        "duration_group": 600,
        "question": "Who comes in last?",
        "candidates": ["a cook", "a dog", "nobody"],
        "correct_choice": 1,
        "question_category": "T3O",
    }
    test = row | {"id": "hidden", "correct_choice": -1}
    write_json(folder / "lvb_val.json", [row, row | {"id": "2", "duration_group": 15}, test])


def mlvu(folder):
    for task, number, answer in [("count", 4, "2"), ("plotQA", 1, "a hat"), ("plotQA", 1, "a cat")]:
        path = folder / "json" / f"{number}_{task}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        video = f"{task}_{len(rows)}.mp4"
        write_video(folder / "video" / f"{number}_{task}" / video)
        rows.append(
            {
                "video": video,
                "duration": 480.0,
                "question": "What is it?",
                "candidates": ["1", answer, "none"],
                "answer": answer,
                "question_type": task,
            }
        )
        write_json(path, rows)
    summary = {"video": "s.mp4", "question": "Sum up.", "answer": "…", "question_type": "summary"}
    write_json(folder / "json" / "9_summary.json", [summary])


def lvbench(folder):
    write_video(folder / "videos" / "Cm73ma6Ibcs.mp4")
    qa = {
        "uid": "9",
        "question": "What year does it begin?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
        "answer": "D",
        "question_type": ["key information retrieval", "reasoning"],
        "time_reference": "00:15-00:19",
    }
    line = {"key": "Cm73ma6Ibcs", "type": "cartoon", "qa": [qa, qa | {"uid": "10", "answer": "A"}]}
    write_lines(folder / "video_info.meta.jsonl", [line])


def cg_bench(folder):
    write_video(folder / "cg_videos" / "3ZpmN3-2-Zo.mp4")
    row = {
        "qid": 14,
        "video_uid": "3ZpmN3-2-Zo",
        "question": "What colour is the cart?",
        "answer": "white",
        "choices": ["grey", "blue", "silver", "white"],
        "right_answer": "D",
        "clue_intervals": [[0, 1]],
        "domain": "Art & Culture",
        "sub_category": "Entity Perception",
        "duration": 2,
    }
    write_json(folder / "cgbench.json", [row])
    facts = {"3ZpmN3-2-Zo": {"duration": 2.0, "max_frame": 19, "fps": 10.0}}
    write_json(folder / "video_meta_info.json", facts)


def nextgqa(folder):
    write_video(folder / "videos" / "1164" / "3238737531.mp4")
    row = {
        "video_id": "3238737531",
        "frame_count": 20,
        "width": 96,
        "height": 64,
        "question": "why does the man bend down",
        "answer": "tie his shoe",
        "qid": "6",
        "type": "CW",
        "a0": "to dance",
        "a1": "to sleep",
        "a2": "tie his shoe",
        "a3": "wave",
        "a4": "jump",
    }
    write_table(folder / "test.csv", [row, row | {"qid": "7"}], ",")
    windows = {"duration": 2, "location": {"6": [[0.2, 0.8], [1.0, 1.4]]}, "fps": 10.0}
    write_json(folder / "gsub_test.json", {"3238737531": windows})


def vsi_bench(folder):
    write_video(folder / "scannet" / "scene0011_00.mp4")
    row = {
        "id": 0,
        "dataset": "scannet",
        "scene_name": "scene0011_00",
        "question_type": "object_counting",
        "question": "How many tables are there?",
        "ground_truth": "4",
        "options": None,
    }
    choice = row | {
        "id": 1,
        "question_type": "object_rel_direction_easy",
        "question": "Is the stove to my left?",
        "ground_truth": "B",
        "options": ["A. left", "B. right"],
    }
    hard = choice | {"id": 2, "question_type": "object_rel_direction_hard", "ground_truth": "A"}
    write_lines(folder / "test.jsonl", [row, choice, hard])


def dynamath(folder):
    def row(index, qid, kind, answer):
        return {
            "index": index,
            "image": in_base64(index),
            "question": "How long is the side?",
            "answer": answer,
            "answer_type": kind,
            "subject": "plane geometry",
            "knowledge_level": "high school",
            "qid": qid,
            "varid": index % 2 + 1,
        }

    rows = [row(1, 1, "float", "2.500"), row(2, 1, "float", "6.283"), row(3, 2, "text", "sine")]
    write_table(folder / "DynaMath.tsv", [*rows, row(4, 3, "multiple choice", "C")])


def mathverse(folder):
    write_image(folder / "images" / "images_version_1-4" / "image_685.png")
    row = {
        "sample_index": "3421",
        "problem_index": "685",
        "problem_version": "Text Dominant",
        "question": "A can is 13 cm high. How long is the straw?",
        "image": "images_version_1-4/image_685.png",
        "answer": "14",
        "question_type": "free-form",
        "metadata": {"split": "testmini", "subject": "Solid Geometry", "subfield": "Length"},
        "query_wo": "Please answer. Question: How long is the straw?",
    }
    choice = row | {
        "sample_index": "1",
        "problem_version": "Vision Only",
        "question": "",
        "query_wo": "Which angle is it?\nChoices:\nA:30°\nB:60°",
        "answer": "B",
        "question_type": "multi-choice",
    }
    text = row | {"sample_index": "2", "problem_version": "Text Only", "image": ""}
    write_json(folder / "testmini.json", [row, choice, text])


def wemath(folder):
    rows = []
    for problem, steps in (("2steps_1", 2), ("3steps_1", 3)):
        kind = problem.partition("_")[0]
        for step in [*range(1, steps + 1), "multi"]:
            image = f"{kind}/image/1-{step}.png"
            write_image(folder / image)
            rows.append(
                {
                    "ID": problem,
                    "split": "testmini",
                    "question": "How long is it?",
                    "option": "A. 300, 400;B. 400, 300;C. 30; D. 4 m.; E. No correct answer",
                    "answer": "B",
                    "image_path": image,
                    "key": f"{kind}_{step}",
                }
            )
    write_json(folder / "testmini.json", rows)


def tir_bench(folder):
    write_image(folder / "data" / "a.jpg", size=(30, 20))
    write_image(folder / "data" / "b.jpg", size=(10, 25))

    def row(number, task, answer, **more):
        first = {"question_id": number, "task": task, "prompt": "Do it.", "image_1": "data/a.jpg"}
        return first | {"answer": answer} | more

    side = {"meta_data": {"difficulty": 2}}
    rows = [
        row(0, "jigsaw", "1, 2, 3, 4", **side),
        row(1, "spot_difference", "[2, 3, 6]", image_2="data/b.jpg"),
        row(2, "word_search", "[3, 6]"),
        row(3, "ocr", "open"),
        row(4, "color", "C"),
        row(5, "instrument", "2.5"),
        row(6, "maze", "12"),
        row(7, "refcoco", "AC"),
        row(8, "jigsaw", "1, 2", **side),
    ]
    write_json(folder / "TIR-Bench.json", rows)


def _reason_rft(folder, name, answers, images):
    for path in images:
        write_image(folder / "images" / path, size=(20, 20))
    for split, answer in answers.items():
        row = {"id": f"{name}-{split}", "problem": "<image>\nHow many are left?", "answer": answer}
        row["image"] = images[0] if len(images) == 1 else images
        write_json(folder / "test_jsons" / f"{name}-{split}-test-1k.json", [row])


def reason_rft_counting(folder):
    _reason_rft(folder, "Visual-Counting", {"id": "5", "ood": "0"}, ["clevr/a.png"])


def reason_rft_structure(folder):
    _reason_rft(folder, "Structure-Perception", {"id": "B", "ood": "2.5"}, ["geo/a.png"])


def reason_rft_spatial(folder):
    answers = {
        "id": "change_color(1, red), change_size(2, small)",
        "ood-left": "change_size(0, big)",
    }
    _reason_rft(folder, "Spatial-Transformation", answers, ["t/a.png", "t/b.png"])


MAKERS = {name: globals()[name] for name in BENCHMARKS}


def made(name, folder: Path, *, with_windows=False, **kw):
    """A benchmark with its tiny release, and its items and what was said of odd rows."""
    MAKERS[name](folder)
    return opened(name, folder, with_windows=with_windows, **kw)


def opened(name, folder: Path, *, with_windows=False, media=None):
    store = MediaStore(media or folder, folder / "unpacked")
    benchmark = BENCHMARKS[name](folder, store, with_windows=with_windows)
    report = Report()
    return benchmark, benchmark.items(report), report
