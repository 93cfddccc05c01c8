"""YouCook2 in the format of ActivityNet Captions: the steps of recipes and their windows."""

from __future__ import annotations

from reframe_vl.data.sources.activitynet_captions import ActivityNetCaptions


class YouCook2(ActivityNetCaptions):
    """The files of all splits."""

    licence = "Annotations: MIT (of a copy, unverified). Videos: YouTube's terms."
