"""The page in a browser: safe whatever was written, and it filters, compares and colours."""

import pytest

# Chromium takes seconds to start, and longer on a busy machine.
pytestmark = pytest.mark.timeout(400)


def test_what_a_model_wrote_is_shown_as_text_and_never_obeyed(page, drive):
    got = drive(
        page,
        """
  got.scripts = all("script").length;
  got.elements = {};
  got.texts = {};
  for (const i of [0, 1, 2, 3]) {
    await press(i ? "j" : "Home");
    await until(() => document.documentElement.dataset.rollout === String(i));
    got.texts[i] = one("#detail").textContent;
    got.elements[i] = all("#detail script, #detail iframe, #detail [onerror], #detail a").length;
    got.missing ??= 0;
    got.missing += all("#detail .missing").length;
  }
  await press("1");
  got.more = one("#detail .more-text").textContent;
  one("#detail .more-text").click();
  got.long = one("#detail .tokens").textContent.length;
  got.hacked = window.hacked ?? null;
  got.direction = getComputedStyle(one("#detail .tokens")).unicodeBidi;
  got.title = one(".runs").textContent;
  got.markup = all(".runs b").length;
  got.afterwards = all("script").length;
""",
    )
    hostile = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    assert got["hacked"] is None
    assert got["scripts"] == got["afterwards"]
    assert set(got["elements"].values()) == {0}
    assert got["texts"]["1"].count(hostile) >= 2
    assert f"Error: {hostile}" in got["texts"]["2"]
    # Right-to-left text is there; what would turn the order of the rest is shown by its code.
    assert "\u05e9\u05dc\u05d5\u05dd" in got["texts"]["0"] and "U+202E" in got["texts"]["0"]
    assert "\u202e" not in got["texts"]["0"]
    assert got["direction"] == "plaintext"
    assert "U+D800" in got["texts"]["1"]
    assert got["missing"] > 0
    assert "more tokens" in got["more"]
    assert got["long"] >= 50_000
    assert "<b>name" in got["title"] and got["markup"] == 0


def test_rollouts_are_found_compared_and_coloured(page, drive):
    got = drive(
        page,
        """
  const count = () => one("#count").textContent;
  got.all = count();
  got.rows = all(".row").length;
  const filters = {
    text: ["HACKED = 1"], sample: ["mini_video"], stepFrom: ["1"], rewardTo: ["0.5"],
    drop: ["dropped", "kept"], gate: ["yes"], right: ["no", "none"], termination: ["7"],
  };
  got.counts = {};
  for (const [name, values] of Object.entries(filters)) {
    for (const value of values) {
      await fill(name, value);
      await until(() => !count().startsWith("Reading"));
      got.counts[`${name} ${value}`] = count();
    }
    await fill(name, "");
  }
  await fill("sort", "-reward");
  got.lowest = one(".row b").textContent;
  await fill("sort", "");
  await press("Home");
  await press("n");
  await until(() => document.documentElement.dataset.rollout === "1");
  got.dots = all("#detail .dot").length;
  got.contexts = all("#detail .context > h3").map((h) => h.textContent);
  got.boxes = all("#detail .original rect.asked, #detail .original rect.evidence").length;
  got.rewardRows = all("#detail .rewards tr").map((row) => row.textContent);
  got.colors = {};
  for (const [at, name] of ["provenance", "logprob", "advantage", "gap"].entries()) {
    await press(String(at + 1));
    await until(() => one(`[data-color="${name}"]`).getAttribute("aria-checked") === "true");
    await wait(100);
    got.colors[name] = one("#detail .token").className;
  }
  got.tip = one("#detail .token").title;
  await press("c");
  await press("j");
  await until(() => document.documentElement.dataset.rollout === "2");
  got.pinned = !one("#pinned").hidden && one("#pinned h2").textContent;
  got.injected = all("#detail .edge-injected").length;
  got.branches = all("#detail .context > h3").map((h) => h.textContent);
  got.gateChips = all("#detail .calls .gate").length;
  await press("c");
  await press("End");
  await until(() => document.documentElement.dataset.rollout === "9");
  got.frames = all("#detail .frame").length;
  got.evidence = all("#detail .frame.evidence").length;
  got.asked = all("#detail .frame.asked").length;
  got.address = location.hash;
""",
    )
    assert got["all"] == "10 rollouts" and got["rows"] == 10
    assert got["counts"] == {
        "text HACKED = 1": "4 of 10 rollouts",
        "sample mini_video": "2 of 10 rollouts",
        "stepFrom 1": "5 of 10 rollouts",
        "rewardTo 0.5": "2 of 10 rollouts",
        "drop dropped": "2 of 10 rollouts",
        "drop kept": "8 of 10 rollouts",
        "gate yes": "2 of 10 rollouts",
        "right no": "2 of 10 rollouts",
        "right none": "2 of 10 rollouts",
        "termination 7": "2 of 10 rollouts",
    }
    assert got["lowest"] == "0.25"
    assert got["dots"] == 8
    assert got["contexts"] == [
        "Context 1: with the original",
        "Context 2: after the original was dropped",
    ]
    assert got["boxes"] >= 2
    assert any("NaN" in row for row in got["rewardRows"])
    assert got["colors"] == {
        "provenance": "token by-sampled",
        "logprob": "token heat s1",
        "advantage": "token less s6",
        "gap": "token less s1",
    }
    assert "log-prob −0.5" in got["tip"] and "gap −0.5" in got["tip"]
    assert got["pinned"]
    assert got["branches"] == ["Branch 1: the canonical call"]
    assert got["injected"] == 2 and got["gateChips"] == 1
    assert got["frames"] > 1 and got["evidence"] > 0 and got["asked"] == 1
    assert "rollout=9" in got["address"] and "color=gap" in got["address"]
