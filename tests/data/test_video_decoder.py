import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clips import frame_numbers, make_clip, repeated
from reframe_vl.data import video_decoder
from reframe_vl.data.decoded_frames import DecodedFrames
from reframe_vl.data.media import MediaError
from reframe_vl.data.video_decoder import VideoDecoder, VideoWorkerError, shared_decoder

WORKER = Path(video_decoder.__file__).with_name("video_worker.py")


@pytest.fixture
def video(tmp_path):
    return make_clip(tmp_path / "a.mp4", n=30)


def spoilt(tmp_path, before):
    """A worker that does something before it answers a request."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, runpy, signal, sys, time\n"
        f"sys.path.insert(0, {str(WORKER.parent)!r})\n"
        "import video_worker\n"
        "answer = video_worker._answer\n"
        "def spoilt(request, replies):\n"
        f"    {before}\n"
        "    return answer(request, replies)\n"
        "video_worker._answer = spoilt\n"
        "video_worker.main()\n"
    )
    return (sys.executable, str(script))


def pid_of(decoder):
    return decoder._process.pid


def is_gone(pid, within_s=60.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_e02_a_file_that_hangs_is_read_frame_by_frame(tmp_path, video, caplog):
    command = spoilt(tmp_path, "if not request['plain']: time.sleep(60)")
    with VideoDecoder(deadline_s=3.0, command=command) as decoder:
        frames = decoder.frames(video, [0.5, 2.0], (96, 64))
        assert frame_numbers(frames) == pytest.approx([5, 20], abs=0.6)
    assert f"{video}: decoding it took over 3 s" in caplog.text


def test_e02_a_file_that_hangs_in_every_way_is_an_error_and_not_tried_again(tmp_path, video):
    other = make_clip(tmp_path / "b.mp4", n=3)
    command = spoilt(tmp_path, "if request['path'].endswith('a.mp4'): time.sleep(60)")
    with VideoDecoder(deadline_s=2.0, command=command) as decoder:
        with pytest.raises(MediaError, match=r"a\.mp4: .*took over 2 s.*frame by frame.*ffmpeg"):
            decoder.size(video)
        with pytest.raises(MediaError, match="took over 2 s"):
            decoder.frames(video, [0.0], (96, 64))
        assert decoder._process is None
        assert decoder.size(other) == (96, 64)


def test_a_deadline_is_for_each_frame_not_for_all(tmp_path, video):
    command = spoilt(tmp_path, "pass")
    script = Path(command[1])
    script.write_text(
        script.read_text().replace(
            "video_worker._answer = spoilt",
            "upright = video_worker._upright\n"
            "video_worker._upright = lambda *a: (time.sleep(0.5), upright(*a))[1]",
        )
    )
    with VideoDecoder(deadline_s=3.0, command=command) as decoder:
        assert len(decoder.frames(video, [i / 10 for i in range(8)], (96, 64))) == 8


def test_frames_are_decoded_once_while_the_store_has_room(tmp_path, video):
    times = [0.0, 0.5, 1.0]
    with VideoDecoder() as decoder:
        first = decoder.frames(video, times, (96, 64))
        expected = [frame.copy() for frame in first]
        first[1][:] = 0
        decoder.close()
        again = decoder.frames(video, times[::-1], (96, 64))
        assert decoder._process is None
        np.testing.assert_array_equal(again[::-1], expected)
        assert len(decoder.frames(video, [*times, 1.5], (96, 64))) == 4
        make_clip(video, n=5)
        assert frame_numbers(decoder.frames(video, [0.1], (96, 64))) == pytest.approx([1], abs=0.6)
        with pytest.raises(MediaError, match="no frame of the video is shown from 1"):
            decoder.frames(video, [1.0], (96, 64))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=60), st.integers(0, 20))
def test_the_store_keeps_the_latest_within_its_bound(asked, bound):
    store = DecodedFrames(bound * 3)
    kept = {}
    for name, size in asked:
        found = store.find((name, size))
        assert (found is not None) == ((name, size) in kept)
        kept.pop((name, size), None)
        frame = np.full((1, size, 3), name, np.uint8)
        store.store((name, size), frame)
        if size <= bound:
            kept[(name, size)] = frame
        while sum(frame.nbytes for frame in kept.values()) > bound * 3:
            kept.pop(next(iter(kept)))
        assert store.num_bytes == sum(frame.nbytes for frame in kept.values())


def test_a_killed_worker_is_replaced(video):
    with VideoDecoder() as decoder:
        decoder.size(video)
        first = pid_of(decoder)
        os.kill(first, signal.SIGKILL)
        assert is_gone(first)
        assert frame_numbers(decoder.frames(video, [1.0], (96, 64))) == pytest.approx([10], abs=0.6)
        assert pid_of(decoder) != first


def test_a_file_that_kills_the_worker_twice_is_an_error(tmp_path, video):
    command = spoilt(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    with (
        VideoDecoder(command=command) as decoder,
        pytest.raises(MediaError, match="ended the worker"),
    ):
        decoder.size(video)


def test_e09_a_file_that_wants_too_much_memory_is_an_error_and_the_worker_goes_on(tmp_path, video):
    command = spoilt(tmp_path, "if request['what'] == 'times': bytearray(64 << 30)")
    with VideoDecoder(command=command) as decoder:
        with pytest.raises(MediaError, match="MemoryError"):
            decoder.times(video)
        assert decoder.size(video) == (96, 64)


def test_a_worker_that_cannot_start_is_no_fault_of_the_file(tmp_path, video):
    with pytest.raises(VideoWorkerError, match="PyAV"):
        VideoDecoder(command=(sys.executable, "-c", "raise SystemExit(1)")).size(video)
    with pytest.raises(VideoWorkerError, match="cannot be run"):
        VideoDecoder(command=(str(tmp_path / "gone"),)).size(video)


def test_an_interrupted_call_does_not_leave_its_reply_to_the_next(video, monkeypatch):
    with VideoDecoder() as decoder:
        read = decoder._read

        def interrupted(buffer, end):
            read(buffer, end)
            raise KeyboardInterrupt

        decoder.size(video)
        monkeypatch.setattr(decoder, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.frames(video, [0.0, 1.0], (96, 64))
        monkeypatch.undo()
        assert decoder.size(video) == (96, 64)


def test_e03_threads_take_turns_and_a_fork_has_a_worker_of_its_own(video):
    with ThreadPoolExecutor(8) as pool:
        read = lambda i: frame_numbers(shared_decoder().frames(video, [i / 10], (96, 64)))[0]  # noqa: E731
        assert list(pool.map(read, range(30))) == pytest.approx(range(30), abs=0.6)
    held = threading.Event()
    stop = threading.Event()

    def hold():
        with shared_decoder()._lock:
            held.set()
            stop.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        # The lock is held by a thread that this process does not have.
        signal.alarm(60)
        ok = shared_decoder().size(video) == (96, 64)
        shared_decoder().close()
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    stop.set()
    thread.join()
    assert status == 0


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_worker_outlives_its_process(tmp_path, video, end, busy):
    command = spoilt(tmp_path, "if request['what'] == 'times': time.sleep(60)")
    script = (
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "from reframe_vl.data.video_decoder import VideoDecoder, shared_decoder\n"
        f"shared_decoder()._command = {command!r}\n"
        f"video = Path({str(video)!r})\n"
        "shared_decoder().size(video)\n"
        "worker = shared_decoder()._process.pid\n"
        f"if {busy}: threading.Thread(\n"
        "    target=lambda: shared_decoder().times(video), daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print(worker, flush=True)\n"
        f"time.sleep(60) if {end == 'kill'} else os._exit(0) if {busy} else None\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    if end == "kill":
        process.kill()
    process.wait()
    process.stdout.close()
    assert is_gone(worker)


def peak_mb(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_e08_memory_does_not_grow_with_the_length_of_a_video(tmp_path):
    short = make_clip(tmp_path / "short.mp4", n=50, fps=1, size=(320, 240), gop=50)
    peaks = []
    for path, seconds in ((short, 50), (repeated(short, tmp_path / "hour.mp4", 72), 3600)):
        with VideoDecoder() as decoder:
            times, end = decoder.times(path)
            assert (len(times), end) == (seconds, pytest.approx(seconds, abs=1e-3))
            wanted = [times[i] for i in np.linspace(0, len(times) - 1, 8).astype(int)]
            assert len(decoder.frames(path, wanted, (320, 240))) == 8
            peaks.append(peak_mb(pid_of(decoder)))
    assert peaks[1] < peaks[0] + 20


def test_e08_files_are_closed_after_use(tmp_path):
    with VideoDecoder() as decoder:
        for i in range(10):
            path = make_clip(tmp_path / f"{i}.mp4", n=2)
            decoder.frames(path, decoder.times(path)[0], (96, 64))
        files = [os.readlink(link) for link in Path(f"/proc/{pid_of(decoder)}/fd").iterdir()]
        assert not [name for name in files if name.endswith(".mp4")]


def test_a_frame_that_the_worker_leaves_out_is_an_error_and_never_what_was_in_memory(
    tmp_path, video
):
    command = spoilt(tmp_path, "request['times_s'] = request.get('times_s', [])[:-1]")
    with (
        VideoDecoder(command=command) as decoder,
        pytest.raises(MediaError, match=r"a\.mp4: .*left out 1 of the frames"),
    ):
        decoder.frames(video, [0.5, 1.0], (96, 64))


def test_a_time_that_is_asked_for_twice_is_one_frame(video):
    with VideoDecoder() as decoder:
        frames = decoder.frames(video, [1.0, 0.5, 1.0], (96, 64))
        assert frame_numbers(frames) == pytest.approx([10, 5, 10], abs=0.6)
