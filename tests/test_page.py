"""cli/page.py: --report's page has every token, runs no script of a text, and costs other runs
nothing."""

import contextlib
import json
import math
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

import cli.main
from cli.flags import parse_args
from cli.main import main as run
from cli.page import Token, page

pytestmark = pytest.mark.attack
DRAFT = f"--draft_checkpoint {ROOT}/checkpoints/demo-draft --speculate_k 3"
COMMON = ["--max_new_tokens=24", "--dtype=float32", "--device=cpu", "--json", "--ordered"]
ATTACK = "</script><script>document.title='attacked'</script><!-- Once"


def decode(tmp_path, capsys, flags: str, *prompts: str) -> tuple[str, dict, list[dict]]:
    """(the page, its data, the objects of --json) of prompts in a file."""
    file, prompt_file = tmp_path / "report.html", tmp_path / "prompts.jsonl"
    prompt_file.write_text(
        "".join(json.dumps({"id": f"<b>{n}", "prompt": p}) + "\n" for n, p in enumerate(prompts))
    )
    capsys.readouterr()
    run(
        parse_args(
            [*flags.split(), *COMMON, "--prompt_file", str(prompt_file), "--report", str(file)]
        )
    )
    html = file.read_text()
    data = json.loads(re.search(r"^const data = (.*);$", html, re.MULTILINE)[1])
    assert not list(tmp_path.glob("*.partial"))
    return html, data, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        f"{DRAFT} --batch_size 1",
        f"{DRAFT} --batch_size 2 --temperature 0",
        "--batch_size 2",
        f"{DRAFT} --stop . the",
    ],
    ids=["sampled", "two rows", "no draft", "stop"],
)
def test_the_page_has_the_tokens_of_json(tmp_path, capsys, flags):
    _, data, results = decode(tmp_path, capsys, flags, "One day, the dog", ATTACK)
    assert len(results) == len(data["answers"]) == 2
    for answer, result in zip(data["answers"], results, strict=True):
        tokens, facts = answer["tokens"], result["speculative"]
        assert "".join(token["text"] for token in tokens) == result["text"]
        assert answer["label"].count(f"id {result['id']}") == answer["label"].count("line ") == 1
        assert (
            len(tokens) == len(result["tokens"])
            and answer["finish_reason"] == result["finish_reason"]
        )
        assert [token["logprob"] for token in tokens] == [
            top[0]["logprob"] for top in result["logprobs"]
        ]
        assert all(0 < token["p"] <= 1 for token in tokens)
        assert [token["at"] for token in tokens] == sorted(token["at"] for token in tokens)
        numbers = [token["round"] for token in tokens]
        assert numbers == sorted(numbers) and set(numbers) == set(
            range(numbers[0], numbers[0] + len(set(numbers)))
        )
        assert max(numbers) == len(answer["costs"]) + 1, "every step decided a token"
        drafted = [token for token in tokens if token["q"] is not None]
        assert {token["origin"] for token in drafted} <= {"accepted", "corrected"}
        if facts is None:
            assert (
                {token["origin"] for token in tokens} == {"plain"}
                and not drafted
                and answer["steps"] == []
            )
            continue
        origins = [token["origin"] for token in tokens]
        assert origins[0] == "plain" and "accepted" in origins
        assert [sum(pair) for pair in zip(*answer["steps"])] == [
            facts["drafted"],
            sum(a for _, a in answer["steps"]),
        ]
        assert len(answer["steps"]) == facts["rounds"] == len(set(numbers)) - 1
        if "--stop" not in flags:  # a stop string cuts the last round
            assert origins.count("accepted") == facts["accepted"]
        assert answer["summary"][0].startswith("speculation, K = 3")


def test_a_token_of_a_draft_that_is_not_finite_is_json():
    token = Token(5, "a", p=0.5, q=math.nan, overlap=math.nan)
    data = json.loads(json.dumps(token.as_json(), allow_nan=False))
    assert (data["p"], data["q"], data["overlap"]) == (0.5, None, None)


def test_text_is_data_and_the_page_needs_no_network(tmp_path, capsys):
    html, data, _ = decode(tmp_path, capsys, "", ATTACK)
    assert data["answers"][0]["prompt"] == ATTACK
    assert html.count("<script") == html.count("</script>") == 1 and "<b>" not in html
    assert (
        re.findall(r"https?://[^\"']*", html) == ["http://www.w3.org/2000/svg"]
        and "default-src 'none'" in html
    )


def test_both_pages_have_the_same_script_and_style():
    pages = [page(ROOT / name) for name in ("cli/report.html", "scripts/serve/serve.html")]
    for name in ("tokens.js", "tokens.css"):
        assert all((ROOT / "cli" / name).read_text() in html for html in pages)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--report /no/such/folder/report.html", "its folder does not exist"),
        (f"--report {ROOT}/checkpoints", "checkpoints is a folder: name a file in it"),
        ("--report report.html --interactive", "--report does not work with --interactive"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_loading(flags, message, monkeypatch):
    monkeypatch.setattr(cli.main, "open_llm", None)
    with pytest.raises(ValueError, match=message):
        run(parse_args(flags.split()))


def test_other_runs_record_nothing(monkeypatch, tmp_path):
    records = []
    monkeypatch.setattr(
        cli.main, "report", lambda timings, engine: records.append(engine.planner.records_logprobs)
    )
    for flags in ([], ["--report", str(tmp_path / "report.html")]):
        run(parse_args([*flags, "--max_new_tokens", "2", "--device", "cpu"]))
    assert records == [False, True]


# The elements that scripts/serve/markdown.js makes, as far as it needs them.
ELEMENTS = """
class Node {
  constructor(tag) { this.tag = tag; this.parts = []; }
  append(...parts) {
    for (const part of parts) this.parts.push(...(part.tag === "#" ? part.parts : [part]));
  }
  appendChild(part) { this.append(part); return part; }
}
const document = {createDocumentFragment: () => new Node("#")};
const make = (tag, name = "", text = "") =>
  Object.assign(new Node(tag), {parts: text ? [text] : []});
function* within(node, depth = 0) {
  if (typeof node === "string") return yield [node, depth];
  for (const part of node.parts) yield* within(part, depth + 1);
}
"""
MARKS = [*"*_`~[#->\\", "> ", "- ", "1. ", "# ", "  - a\n", "> \n", "`\n", "~~~\n", "\u2028", "\t"]
MARKS += [f"{mark}a " for mark in ("*", "_", "**", "__", "~~", "`", "[", "[a](http://", "***")]
MARKS += ["*a **b ", "**a b** ", "_a* ", "` `` ", "# a #", " #", "[[", "``` `", "- - ", "**_~~"]


@pytest.mark.parametrize("frame", ["TEXT", "- TEXTx", "# TEXTx", "~~~TEXT`", "` TEXT\u2028x"])
def test_any_text_is_formatted_in_linear_time_and_without_deep_nesting(tmp_path, frame):
    """40,000 signs of every sort: a time that grows with the square of that would be minutes. No
    letter of a text is lost."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine: apt-get install nodejs")
    texts = [frame.replace("TEXT", mark * (40_000 // len(mark))) for mark in MARKS]
    program = f"""{ELEMENTS}{(ROOT / "scripts" / "serve" / "markdown.js").read_text()}
    const letters = text => text.replace(/https?:|[^a-z]/g, "");
    for (const text of {json.dumps(texts)}) {{
      const nodes = [...within(markdown(text))];
      const deepest = nodes.reduce((most, [, depth]) => Math.max(most, depth), 0);
      const written = letters(nodes.map(([part]) => part).join(""));
      const numLost = letters(text).length - written.length;  // a letter behind a fence is none
      if (deepest > 64 || numLost < 0 || numLost > 1) throw new Error(text.slice(0, 40));
    }}"""
    (tmp_path / "markdown.cjs").write_text(program)
    subprocess.run([node, tmp_path / "markdown.cjs"], check=True, timeout=120)


@contextlib.contextmanager
def chromium():
    """A headless Chromium of the system's."""
    binary = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if binary is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.browser
def test_a_browser_shows_it(tmp_path, capsys):
    _, data, results = decode(
        tmp_path, capsys, f"{DRAFT} --temperature 0", "One day, the dog", ATTACK
    )
    problems = []
    with chromium() as browser:
        opened = browser.new_page(viewport={"width": 1000, "height": 720})
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: problems.append(message.text))
        opened.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:")) or problems.append(request.url)
            ),
        )
        opened.goto((tmp_path / "report.html").as_uri())
        assert opened.locator("article.assistant").all_text_contents() == [
            result["text"] for result in results
        ]
        assert opened.locator("article.user").all_text_contents()[1] == ATTACK
        assert opened.title() == "quickdraft: report"
        drafted = opened.locator("article.assistant .corrected").first
        drafted.hover()
        tip = opened.text_content("#tip")
        assert tip.startswith("corrected\np 1.0000 of the target, q 0.0000 of the draft")
        colours = [
            opened.evaluate(
                "name => getComputedStyle(document.querySelector(`article.assistant"
                " .${name}`)).color",
                name,
            )
            for name in ("accepted", "corrected", "plain")
        ]
        assert len(set(colours)) == 3
        num_bars = sum(1 for answer in data["answers"] for k, _ in answer["steps"] if k)
        assert opened.locator("rect:not(.accepted)").count() == num_bars > 0
        assert opened.locator("table").count() == 2
        cells = opened.locator("table").first.locator("td").all_text_contents()
        num_steps = sum(map(int, cells[1::8]))
        num_tokens = sum(int(n) * float(mean) for n, mean in zip(cells[1::8], cells[2::8]))
        assert num_steps == len(data["answers"][0]["costs"])
        assert abs(num_tokens - (len(results[0]["tokens"]) - 1)) < 0.01 * num_steps
    assert problems == []


@pytest.mark.browser
def test_a_phone_shows_it_and_a_tap_shows_a_tip(tmp_path, capsys):
    """The table of costs scrolls in its box, not the page; the tip of a tap stays until the next
    one elsewhere."""
    decode(tmp_path, capsys, f"{DRAFT} --temperature 0", "One day, the dog")
    with chromium() as browser:
        opened = browser.new_page(
            viewport={"width": 390, "height": 720}, has_touch=True, is_mobile=True
        )
        opened.goto((tmp_path / "report.html").as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth") == 390
        assert opened.evaluate("document.querySelector('table').scrollWidth") > 390
        opened.tap("article.assistant .accepted >> nth=0")
        opened.wait_for_timeout(200)
        assert opened.is_visible("#tip") and opened.text_content("#tip").startswith("accepted\n")
        opened.tap("article.assistant .corrected >> nth=0")
        assert opened.is_visible("#tip") and opened.text_content("#tip").startswith("corrected\n")
        box = opened.locator("#tip").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        opened.tap("header h1")
        assert not opened.is_visible("#tip")
        opened.tap("article.assistant .accepted >> nth=0")
        opened.evaluate("scrollBy(0, 40)")
        opened.wait_for_timeout(200)
        assert not opened.is_visible("#tip"), "it would stand beside another token"
