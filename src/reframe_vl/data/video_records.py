"""Makes records of videos from windows in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reframe_vl.data.evidence import (
    EVIDENCE_VERSION,
    MAX_FRAMES,
    applicability,
    expand_segments,
    segment_coverage,
    subsample_frames,
)
from reframe_vl.data.records import ExpandedEvidence, MediaInfo, Record, Seconds
from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.types import Modality


def video_info(path: Path, rule: GridRule) -> MediaInfo:
    """Reads what a record says of a video, and decodes every frame of its grid once.

    Raises:
        MediaError: The file cannot be read, or a frame of the grid cannot be decoded.
    """
    video = VideoFile(path.absolute(), rule)
    facts = video.facts
    video.look(range(len(facts.timestamps_s)), 1)  # Truncated files may have a good index.
    return MediaInfo(
        path=str(video.path),
        width=facts.size[0],
        height=facts.size[1],
        duration_s=facts.duration_s,
        fps=facts.n_frames / facts.duration_s,
        n_frames=facts.n_frames,
        grid=rule,
        timestamps_s=facts.timestamps_s,
    )


def refuse_expanded(record: Record) -> None:
    """Evidence is expanded once.

    Raises:
        ValueError: It is already.
    """
    if record.evidence is not None:
        raise ValueError(
            f"Record {record.id}: its evidence is expanded already, by rules "
            f"{record.evidence.version!r}. Expand a record only once, when it is made."
        )


def expand_segment_evidence(record: Record, max_frames: int = MAX_FRAMES) -> Record:
    """Fills in expanded evidence, coverage and applicability of a record of a video.

    A record without segments stays without evidence.

    Args:
        max_frames: A segment with more frames is subsampled, so that one call can ask for it.

    Raises:
        ValueError: It is expanded already, it has no grid, or a segment lies outside the video.
    """
    refuse_expanded(record)
    if not record.segments:
        return record
    facts = record.media.facts
    if facts is None:
        raise ValueError(f"Record {record.id} has no grid of frames: make its media by video_info.")
    times_s = facts.timestamps_s
    segments = expand_segments(record.segments, times_s, facts.duration_s)
    coverage = segment_coverage(segments, len(times_s))
    return record.model_copy(
        update={
            "evidence": ExpandedEvidence(
                version=EVIDENCE_VERSION,
                segments=tuple(subsample_frames(segment, max_frames) for segment in segments),
            ),
            "coverage": coverage,
            "applicability": applicability(coverage),
        }
    )


def video_record(
    path: Path,
    segments: Sequence[Seconds],
    rule: GridRule,
    max_frames: int = MAX_FRAMES,
    **fields: Any,
) -> Record:
    """Makes a record of a video with its evidence expanded.

    Args:
        segments: (start, end) in seconds since the start of the file.
        max_frames: As for ``expand_segment_evidence``.
        fields: The other fields of ``Record``.

    Raises:
        MediaError: The file cannot be read, or a frame of the grid cannot be decoded.
        ValueError: A field is missing or wrong, or a segment lies outside the video.
    """
    record = Record(
        modality=Modality.VIDEO,
        media=video_info(path, rule),
        segments=tuple(segments),
        **fields,
    )
    return expand_segment_evidence(record, max_frames)
