"""Rows of record files, as tests write them."""

from reframe_vl.data.evidence import EVIDENCE_VERSION


def row(name, **changes):
    return {
        "id": name,
        "source": "s",
        "split": "train",
        "licence": "MIT",
        "raw": {},
        "modality": "image",
        "media": {"path": "a.png", "width": 100, "height": 80},
        "question": "What?",
        "answer": {"kind": "span", "value": "that"},
        "boxes": [{"xyxy": [10, 20, 30, 40]}],
        "evidence": {"version": EVIDENCE_VERSION, "boxes": [[5, 15, 35, 45]]},
        **changes,
    }


def media(path="a.png", width=100, height=80):
    return {"media": {"path": path, "width": width, "height": height}}


def video(path, segments=((0.5, 1.0),), frames=(0, 1, 2)):
    grid = {"grid": {"fps": 2, "max_frames": 8}, "timestamps_s": [0.2, 0.7, 1.2, 1.7]}
    length = {"duration_s": 2.0, "n_frames": 20}
    return {
        "modality": "video",
        "media": {"path": path, "width": 96, "height": 64} | length | grid,
        "boxes": [],
        "segments": segments,
        "evidence": {"version": EVIDENCE_VERSION, "segments": [frames]},
    }
