import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.verifiers.endpoint_server import ChatServer, completion, echo, slow
from reframe_vl.data.media import ImageFile
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Picture, Query
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.data.verifiers.endpoint import EndpointSettings, EndpointVerifier
from reframe_vl.data.verifiers.questions import read_answer
from reframe_vl.mini.video_world import MiniVideoWorld


def verifier(server: ChatServer, waits: list[float] | None = None, **settings: Any):
    fields = {"url": server.url, "model": "m", "timeout_s": 5.0, **settings}
    sleep = (lambda _: None) if waits is None else waits.append
    return EndpointVerifier(EndpointSettings(**fields), sleep=sleep)


def queries(count: int) -> list[Query]:
    return [Query(f"Say w{number}") for number in range(count)]


def failing(*statuses: int, headers: dict[str, str] | None = None):
    def behaviour(number: int, body: dict[str, Any]):
        if number < len(statuses):
            return statuses[number], headers or {}, "not now"
        return echo(number, body)

    return behaviour


def test_queries_are_asked_at_once_and_answered_in_their_order() -> None:
    with ChatServer(slow(0.05)) as server:
        asker = Asker(verifier(server, concurrency=4))
        replies = asker.ask(queries(12))
    assert [read_answer(reply.text) for reply in replies] == [f"w{n}" for n in range(12)]
    assert 1 < server.most_at_once <= 4
    assert asker.tally.answered == 12 and not asker.tally.failures


def test_pictures_and_the_times_of_frames_are_sent_before_the_text(tmp_path) -> None:
    pixels = np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    video = MiniVideoWorld().sample("t", 0).media
    shown = (
        Picture(ImageFile(tmp_path / "a.png"), 10**6, (0, 0, 30, 40)),
        Picture(video, 1024, frame=3),
    )
    with ChatServer() as server:
        Asker(verifier(server, api_key="k", extra={"seed": 1})).ask([Query("Say yes", shown)])
    (body,) = server.bodies
    content = body["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text", "image_url", "text"]
    assert content[1]["text"] == "<3.0 seconds>" and content[3]["text"] == "Say yes"
    sent = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
    assert (np.array(Image.open(io.BytesIO(sent))) == pixels[:, :30]).all()
    assert body["temperature"] == 0 and body["seed"] == 1 and body["model"] == "m"
    assert server.headers[0]["Authorization"] == "Bearer k"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_tried_again_with_longer_and_longer_waits(status) -> None:
    waits: list[float] = []
    with ChatServer(failing(status, status, status)) as server:
        asker = Asker(verifier(server, waits))
        (reply,) = asker.ask(queries(1))
    assert read_answer(reply.text) == "w0" and asker.tally.retries == 3
    assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(waits)) and len(waits) == 3


def test_the_wait_that_an_endpoint_asks_for_is_kept_within_reason() -> None:
    waits: list[float] = []
    with ChatServer(failing(429, 429, headers={"Retry-After": "7"})) as server:
        Asker(verifier(server, waits, longest_wait_s=7.5)).ask(queries(1))
    assert waits == [7.0, 7.0]


@pytest.mark.parametrize(
    ("behaviour", "kind", "requests"),
    [
        (failing(*[500] * 9), "http_500", 3),
        (failing(*[400] * 9), "http_400", 1),
        (slow(0.3), "timeout", 3),
        (lambda n, b: (200, {}, "no json"), "malformed", 1),
        (lambda n, b: (200, {}, "{}"), "malformed", 1),
        (lambda n, b: (200, {}, completion("So", finish_reason="length")), "truncated", 1),
    ],
)
def test_an_infrastructure_failure_is_no_verdict_and_is_not_kept(
    tmp_path, behaviour, kind, requests
) -> None:
    cache = AnswerCache(tmp_path / "a.sqlite")
    with ChatServer(behaviour) as server:
        asker = Asker(verifier(server, max_tries=3, timeout_s=0.1), cache)
        (reply,) = asker.ask(queries(1))
        assert reply.text is None and reply.failure is not None and reply.failure[0] == kind
        assert asker.tally.failures == {kind: 1} and len(server.bodies) == requests
        server.behaviour = echo
        asked_again = Asker(verifier(server, max_tries=3), cache)
        assert read_answer(asked_again.ask(queries(1))[0].text or "") == "w0"
    cache.close()


def test_an_endpoint_that_is_down_is_a_failure_and_what_was_answered_is_not_asked_again(
    tmp_path,
) -> None:
    server = ChatServer().start()
    settings = {"max_tries": 2, "price_in": 1.0, "price_out": 10.0}
    cache = AnswerCache(tmp_path / "answers.sqlite")
    Asker(verifier(server, **settings), cache).ask(queries(3))
    server.stop()
    asker = Asker(verifier(server, **settings), cache)
    replies = asker.ask(queries(5))
    assert [reply.text is None for reply in replies] == [False] * 3 + [True] * 2
    assert asker.tally.cached == 3 and asker.tally.failures == {"connection": 2}
    assert asker.tally.cost == 0
    server.start()
    cache.close()
    cache = AnswerCache(tmp_path / "answers.sqlite")
    asker = Asker(verifier(server, **settings), cache)
    replies = asker.ask(queries(5))
    server.stop()
    cache.close()
    assert [read_answer(reply.text or "") for reply in replies] == [f"w{n}" for n in range(5)]
    assert len(server.bodies) == 5
    assert asker.tally.cost == pytest.approx(2 * (100 * 1.0 + 10 * 10.0) / 1e6)


def test_another_model_or_picture_is_another_question(tmp_path) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    image = ImageFile(tmp_path / "a.png")
    cache = AnswerCache(tmp_path / "answers.sqlite")
    with ChatServer() as server:
        for box in (None, (0.0, 0.0, 30.0, 30.0)):
            for model in ("a", "b", "a"):
                asker = Asker(verifier(server, model=model), cache)
                asker.ask([Query("Say yes", (Picture(image, 10**6, box),))] * 2)
    cache.close()
    assert len(server.bodies) == 4


def test_an_unreadable_picture_is_a_failure_of_its_query_alone(tmp_path) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    image = ImageFile(tmp_path / "a.png")
    assert image.size and image.key
    (tmp_path / "a.png").write_bytes(b"gone bad")
    with ChatServer() as server:
        bad, good = Asker(verifier(server)).ask(
            [Query("Say no", (Picture(image, 100),)), Query("Say yes")]
        )
    assert bad.failure is not None and bad.failure[0] == "media" and good.text is not None


def test_the_key_is_not_shown() -> None:
    settings = EndpointSettings("u", "m", api_key="secret")
    assert "secret" not in repr(settings) + json.dumps(EndpointVerifier(settings).identity)


@pytest.mark.parametrize("reply", ["[" * 200_000, '{"choices":' * 50_000])
def test_a_reply_too_deep_to_read_is_a_failure_and_no_crash(reply) -> None:
    with ChatServer(lambda number, body: (200, {}, reply)) as server:
        asker = Asker(verifier(server))
        asker.ask(queries(1))
    assert asker.tally.failures == {"malformed": 1}


@pytest.mark.parametrize("count", ["1e999", "NaN", "-5", "1" + "0" * 400, '"many"', "null", "[]"])
def test_a_number_of_tokens_that_can_be_none_costs_nothing_and_spoils_no_answer(count) -> None:
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": 10}}'
    reply = f'{{"choices": [{{"message": {{"content": "w"}}}}], "usage": {usage}}}'
    with ChatServer(lambda number, body: (200, {}, reply)) as server:
        asker = Asker(verifier(server, price_in=1e6, price_out=1e6))
        assert asker.ask(queries(1))[0].text == "w"
    assert (asker.tally.prompt_tokens, asker.tally.cost) == (0, 10.0)


def test_a_wait_that_is_no_number_is_not_kept() -> None:
    with ChatServer(failing(429, headers={"Retry-After": "\u00b2"})) as server:
        assert Asker(verifier(server)).ask(queries(1))[0].failure is None


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(monkeypatch) -> None:
    place = {"url": "http://h/v1", "model": "m", "api_key_env": "A_KEY"}
    monkeypatch.setenv("A_KEY", "secret\nsecond line")
    with pytest.raises(ValueError, match="the key in A_KEY has characters") as refused:
        EndpointSettings.of(place, "here")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("A_KEY", "secret\n")
    assert EndpointSettings.of(place, "here").api_key == "secret"


def test_an_answer_that_drips_is_given_up_after_a_trys_time() -> None:
    with ChatServer() as server:
        server.drip_s = 0.05
        asker = Asker(verifier(server, timeout_s=0.3, max_tries=2))
        [reply] = asker.ask(queries(1))
    assert reply.failure is not None and reply.failure[0] == "timeout"
    assert "no whole answer in 0.3 s" in reply.failure[1]
    assert len(server.bodies) == 2
