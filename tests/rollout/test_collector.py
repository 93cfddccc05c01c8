"""Episodes are played side by side, within bounds, and none waits for another's end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from reframe_vl.rollout.collector import Plan
from reframe_vl.rollout.prompt import build_prompt
from reframe_vl.types import Sampling, Termination
from scripted import END, EngineError, ScriptedEngine, collector, sample

PLAN = Plan(step=0, num_rollouts=3, sampling=Sampling(1.0, 8))


class Watched(ScriptedEngine):
    """Its first session's turn ends when all others have been released."""

    def __init__(self, total):
        super().__init__("<answer>1</answer>" + END)
        self.total, self.most = total, 0
        self.last = asyncio.Event()
        self.released = 0

    def open(self, sessions):
        super().open(sessions)
        self.most = max(self.most, len(self.live))

    async def generate(self, session, context, sampling, seed):
        await asyncio.sleep(0)
        if session.startswith("0/"):
            await asyncio.wait_for(self.last.wait(), 30)
        return await super().generate(session, context, sampling, seed)

    def release(self, session):
        super().release(session)
        self.released += 1
        if self.released == self.total - 1:
            self.last.set()


def test_a_slow_episode_keeps_no_other_waiting():
    samples = [sample(i) for i in range(4)]
    engine = Watched(total=12)
    playing = collector(engine)
    playing.max_concurrent = 2
    groups = playing.collect(samples, PLAN)
    playing.loop.stop()
    assert [g.sample.id for g in groups] == [s.id for s in samples]
    for group in groups:
        assert [r.key.sample_id for r in group.rollouts] == [group.sample.id] * 3
        assert [r.key.index for r in group.rollouts] == [0, 1, 2]
        assert all(r.termination is Termination.ANSWERED for r in group.rollouts)
    # One more, while a session is handed over.
    assert engine.most <= 3
    assert not engine.live


def test_episodes_whose_engine_fails_are_followed_by_the_others():
    engine = ScriptedEngine(EngineError("It has gone."))
    playing = collector(engine)
    playing.max_concurrent = 2
    [group] = playing.collect([sample()], PLAN)
    playing.loop.stop()
    assert [r.termination for r in group.rollouts] == [Termination.ERROR] * 3
    assert not engine.live


def test_waves_in_threads_build_their_prompts_one_after_the_other(monkeypatch):
    lock, built = threading.Lock(), []

    def watched(*args):
        assert lock.locked()
        built.append(args[0].id)
        return build_prompt(*args)

    monkeypatch.setattr("reframe_vl.rollout.collector.build_prompt", watched)
    waves = [[sample(i) for i in (0, 1, 2)], [sample(i) for i in (3, 4, 5)]]
    playing = collector(ScriptedEngine("<answer>1</answer>" + END))
    playing.building = lock
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda wave: playing.collect(wave, PLAN), waves))
    playing.loop.stop()
    assert [g.sample.id for part in groups for g in part] == [s.id for w in waves for s in w]
    whole = [s.id for s in waves[0]], [s.id for s in waves[1]]
    assert built in (whole[0] + whole[1], whole[1] + whole[0])
