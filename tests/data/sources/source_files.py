"""Tiny annotation files, true to each source's format, and how tests read them."""

import json
from pathlib import Path
from typing import Any

from reframe_vl.data.records import Record
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES

Files = dict[str, Any]
"""Name of a file -> its bytes, its text, its rows (of .jsonl) or its JSON value."""

VISUAL_COT = {
    "question": "What is the total?",
    "answer": "9.00",
    "image": "a.jpg",
    "width": 100,
    "height": 80,
    "bboxs": [[10, 20, 30.5, 40]],
    "dataset": "docvqa",
    "split": "train",
}
REQUEST = (
    " Please provide the bounding box coordinate of the region that can help you answer the "
    "question better."
)
CONVERSATION = {
    "dataset": "gqa",
    "split": "val",
    "question_id": 7,
    "image": ["cot/gqa/1.jpg", "cot/gqa/1.jpg###[10, 20, 30, 40]"],
    "conversations": [
        {"from": "human", "value": f"<image>\nWhat is red?{REQUEST}"},
        # 80 wide and 101 high: 10 of the 21 pixels of padding stand on the left.
        {"from": "gpt", "value": "[0.198, 0.198, 0.396, 0.396]"},
        {"from": "human", "value": "<image>"},
        {"from": "gpt", "value": "the door"},
    ],
}
PLACE = {
    "img_path": "cot/gqa/1.jpg",
    "expression": "What is red?",
    "bbox": [10, 20, 30, 40],
    "height": 101,
    "width": 80,
    "question_id": 7,
    "split": "val",
}
EXPRESSION = {
    "img_path": "COCO_train2014_000000000001.jpg",
    "expression": "dog on the left",
    "bbox": [10.5, 20, 30, 40],
    "dataset_name": "refcoco",
    "height": 80,
    "width": 100,
    "image_id": 1,
    "sent_id": 3,
    "split": "val",
}
COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 80}],
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [
        {"id": 5, "image_id": 1, "category_id": 1, "bbox": [10.1, 20, 5.2, 8], "iscrowd": 0},
        {"id": 6, "image_id": 1, "category_id": 2, "bbox": [40, 20, 30, 40], "iscrowd": 0},
        {"id": 7, "image_id": 1, "category_id": 1, "bbox": [50, 20, 30, 40], "iscrowd": 0},
    ],
}
VISDRONE = "10,20,5,8,1,4,0,0\n40,20,30,40,1,1,0,1\n50,20,30,40,1,4,0,0,\n"
VOC = """<annotation><filename>a.jpg</filename>
<size><width>100</width><height>80</height><depth>3</depth></size>
<object><name>dog</name><difficult>0</difficult>
<bndbox><xmin>11</xmin><ymin>21</ymin><xmax>30</xmax><ymax>40</ymax></bndbox></object>
<object><name>cat</name><difficult>0</difficult>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>100</xmax><ymax>80</ymax></bndbox></object>
<object><name>dog</name><difficult>1</difficult>
<bndbox><xmin>50</xmin><ymin>21</ymin><xmax>60</xmax><ymax>40</ymax></bndbox></object>
</annotation>
"""
TVQA_PLUS = {
    "qid": 9,
    "q": "Who sits ?",
    "a0": "Ann .",
    "a1": "Bob .",
    "a2": "Cid .",
    "a3": "Dan .",
    "a4": "Eve .",
    "answer_idx": "3",
    "ts": [1.5, 6],
    "vid_name": "s01e01_clip_00",
    "bbox": {
        "7": [{"img_id": 7, "left": 5, "top": 6, "width": 20, "height": 30, "label": "Dan"}],
        "13": [],
        "1": [{"img_id": 1, "left": 1, "top": 2, "width": 3, "height": 4, "label": "sofa"}],
    },
}
NEXTGQA_CSV = (
    "video_id,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
    "100,300,64,48,why did he jump,fun,4,CW,fear,fun,cold,dance,sleep\n"
    '100,300,64,48,"what, then",run,5,TN,fear,run,cold,dance,sleep\n'
)
NEXTGQA_JSON = {"100": {"duration": 10, "location": {"4": [[1.2, 3], [4, 6.5]]}, "fps": 29.97}}
QVHIGHLIGHTS = {
    "qid": 11,
    "query": "A girl cooks.",
    "duration": 150,
    "vid": "xyz_0.0_150.0",
    "relevant_clip_ids": [3, 4, 7],
    "saliency_scores": [[1, 2, 3]] * 3,
    "relevant_windows": [[6, 10], [14, 16]],
}
CHARADES_LINE = "AB12C 1.5 7.25##person opens the door.\n"
CHARADES = {
    "qid": 1,
    "query": "person opens the door.",
    "duration": 30.5,
    "vid": "AB12C",
    "relevant_windows": [[1.5, 7.25]],
}
CHARADES_CAPTION = {
    "image_id": "AB12C.mp4",
    "caption": "person opens the door.",
    "timestamp": [1.5, 7.25],
    "id": 0,
}
CAPTIONS = {
    "v_a": {
        "duration": 50.5,
        "timestamps": [[0, 4.14], [4.14, 50.5]],
        "sentences": ["Two men stand.", " They sit."],
    }
}
CG_BENCH = {
    "qid": 2,
    "video_uid": "uid",
    "question": "What color is the car?",
    "answer": "red",
    "choices": ["blue", "red", "green"],
    "right_answer": "B",
    "clue_intervals": [[8, 11], [20, 21]],
    "duration": 100,
}
CG_BENCH_VIDEOS = {"uid": {"duration": 100.1, "max_frame": 3002, "fps": 30.0}}
REXTIME = {
    "qid": "anet_1",
    "query": "What does he do before?",
    "duration": 100.5,
    "vid": "v_a",
    "relevant_windows": [[5, 8]],
    "ans": "B",
}
REXTIME_OPTIONS = {
    "qid": "anet_1",
    "question": "What does he do before?",
    "answer": "From <s0> to <e0>, <option>.",
    "duration": 100.5,
    "vid": "v_a",
    "options": ["he runs", "he sits", "he eats", "he leaves"],
    "span": [5, 8],
    "ans": "B",
}

COLUMNS = "media: image.path\nquestion: q\nboxes: bbox\nbox_form: corner_and_size\nsecond: 1000\n"
COLUMNS_ROW = {
    "id": 4,
    "image": {"path": "a.jpg"},
    "width": 100,
    "height": 80,
    "q": "What is red?",
    "answer": "B",
    "options": ["door", "roof"],
    "bbox": [[10, 20, 20.5, 20]],
    "split": "train",
}

TINY: dict[str, list[Files]] = {
    "activitynet_captions": [{"val_1.json": CAPTIONS}],
    "cg_bench": [{"mini.json": [CG_BENCH], "video_meta.json": CG_BENCH_VIDEOS}],
    "charades_sta": [
        {"charades_sta_test.txt": CHARADES_LINE},
        {"test.jsonl": [CHARADES]},
        {"test.json": {"annotations": [CHARADES_CAPTION]}},
    ],
    "columns": [{"rows.jsonl": [COLUMNS_ROW], "columns.yaml": COLUMNS}],
    "coco": [{"instances_val2017.json": COCO}],
    "nextgqa": [{"val.csv": NEXTGQA_CSV, "gsub_val.json": NEXTGQA_JSON}],
    "qvhighlights": [{"highlight_val_release.jsonl": [QVHIGHLIGHTS]}],
    "refcoco": [{"val.jsonl": [EXPRESSION]}],
    "rextime": [{"rextime_val.jsonl": [REXTIME]}, {"rextime_val.json": [REXTIME_OPTIONS]}],
    "tvqa_plus": [{"tvqa_plus_val.json": [TVQA_PLUS]}],
    "visdrone": [{"0001.txt": VISDRONE}, {"visdrone.json": COCO}],
    "visual_cot": [{"docvqa_train.jsonl": [VISUAL_COT]}],
    "visual_cot_benchmark": [{"gqa.json": [CONVERSATION], "gqa.jsonl": [PLACE]}],
    "visual_cot_sroie": [{"sroie.jsonl": [VISUAL_COT]}],
    "voc": [{"a.xml": VOC}],
    "youcook2": [{"yc2_val.json": CAPTIONS}],
}


def write(folder: Path, files: Files) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in files.items():
        path = folder / name
        if isinstance(content, str):
            content = content.encode()
        elif not isinstance(content, bytes):
            by_line = path.suffix == ".jsonl"
            text = "\n".join(map(json.dumps, content)) if by_line else json.dumps(content)
            content = text.encode()
        path.write_bytes(content)
        paths.append(path)
    return paths


def read(
    folder: Path,
    name: str,
    files: Files,
    media: Path | None = None,
    strict: bool = False,
    **settings: Any,
) -> tuple[list[Record], Report]:
    report = Report(strict=strict)
    source = SOURCES[name](write(folder, files), media, **settings)
    return list(source.records(report)), report


def reasons(report: Report) -> dict[str, bool]:
    """Reason -> whether the row was kept."""
    return dict(report.count_by_reason().keys())
