"""Markdown in answers: its elements, that nothing in it runs, and that long answers take bounded time."""

import json
from typing import Any

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.visits import ANSWER, count, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

LINK = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer nofollow">{1}</a>'
CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A *b*\n## C\n###### D\n####### E": "<h3>A <em>b</em></h3><h4>C</h4><h6>D</h6><p>####### E</p>",
    "a **b** __c__ *d* _e_ ~~f~~": "<p>a <strong>b</strong> <strong>c</strong> <em>d</em> <em>e</em> <s>f</s></p>",
    "***both*** **a *b* c**": "<p><strong><em>both</em></strong> <strong>a <em>b</em> c</strong></p>",
    "snake_case_name 2 * 3 * 4 **open": "<p>snake_case_name 2 * 3 * 4 **open</p>",
    "`a*b*` `` `x` `` \\*no\\* `open": "<p><code>a*b*</code> <code>`x`</code> *no* `open</p>",
    "`a``b` ``c`d``": "<p><code>a``b</code> <code>c`d</code></p>",
    "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d</li></ul>",
    "3. a\n4. b\n\n- c": '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>',
    "born in\n1999. A year": "<p>born in\n1999. A year</p>",
    "> a\n> > b\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "```py\nx < 1\n\n# no\n```\nz": '<pre tabindex="0"><code>x &lt; 1\n\n# no</code></pre><p>z</p>',
    "~~~\nopen\n- a": '<pre tabindex="0"><code>open\n- a</code></pre>',
    "Here:\n| A | B |\n|---|--:|\n| 1 | **2** | 3 |\n| `x` |\nend": '<p>Here:</p><div class="scrolls" tabindex="0">'
    '<table><thead><tr><th>A</th><th class="right">B</th></tr></thead><tbody>'
    '<tr><td>1</td><td class="right"><strong>2</strong></td></tr>'
    '<tr><td><code>x</code></td><td class="right"></td></tr></tbody></table></div><p>end</p>',
    "| Jane | 34 |\nJane is 34": "<p>| Jane | 34 |\nJane is 34</p>",
    "[a](https://b.c/d_(e)) <http://f.g/> https://h.i/j_k_l, end": f"<p>{LINK.format('https://b.c/d_(e)', 'a')} "
    f"{LINK.format('http://f.g/', 'http://f.g/')} {LINK.format('https://h.i/j_k_l', 'https://h.i/j_k_l')}, end</p>",
}
HOSTILE = (
    "<img src=x onerror=alert(1)><b>bold</b> & <script>alert(2)</script>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>) [d](//e.vil)",
    '[a](https:alert(1)) [b](vbscript:x) [c]( https://x) [d](java\nscript:x) ![e](x" onerror="alert(1))',
    '<javascript:alert(1)> <https://x" onclick="alert(1)> [x](file:///etc/passwd)',
    "```html\n<script>alert(1)</script>\n```\n`<svg onload=alert(1)>`\n\n| <script> | b |\n|-|-|\n| <img> | c |",
    "# <iframe src=javascript:alert(1)>\n> <style>*{display:none}</style>\n- <a href=javascript:x>y</a>",
)
PLAIN = ["p", "pre", "code", "div", "table", "thead", "tbody", "tr", "th", "td", "h3", "blockquote", "ul", "li"]
LONG = {
    "an unclosed fence": "```\n" + "x = 1\n" * 20_000,
    "one paragraph": "word *and* `code` " * 8_000,
    "open marks": "*a **b _c ~~d " * 10_000,
    "brackets": "[" * 100_000,
    "links without an end": "[a](b" * 20_000,
    "backticks of all lengths": " ".join("`" * length for length in range(1, 400)),
    "nested quotes": ">" * 50_000 + "x",
    "nested lists": "- " * 30_000 + "x",
    "deeper lists": "\n".join(" " * (2 * depth) + "- x" for depth in range(400)),
    "many items": "- item\n" * 10_000,
    "many blocks": "# a\n\nb\n\n" * 3_000,
    "a wide table": "|a" * 5_000 + "\n" + "|-" * 5_000,
    "spaces": "a" + " " * 100_000 + "b\n" + "- " + " " * 100_000,
    "addresses": "http://a.b " * 8_000,
}
STREAMED_MS = 4_000  # in a browser that shares two cores with other tests
ONE_PIECE_MS = 2_000


async def rendered(page: Page, texts: list[str], then: str) -> Any:
    """The value of an expression of `places`, in which the texts were rendered."""
    script = """
      (async () => {
        const { Markdown } = await import('/page/markdown.js');
        const places = TEXTS.map((text) => {
          const place = document.createElement('div');
          const shown = new Markdown(place);
          shown.push(text);
          shown.finish();
          return place;
        });
        return THEN;
      })()
    """
    return await page.evaluate(script.replace("TEXTS", json.dumps(texts)).replace("THEN", then.strip()))


async def test_blocks_and_marks_become_elements(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)

    made = await rendered(page, list(CASES), "places.map((place) => place.innerHTML)")

    assert dict(zip(CASES, made, strict=True)) == CASES


async def test_hostile_text_becomes_no_element_and_does_not_run(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    found = """
      places.flatMap((place) => {
        document.body.append(place);
        return [...place.querySelectorAll('*')].flatMap((each) => {
          const names = each.getAttributeNames().sort().join(' ');
          const isLink = each.localName === 'a' && names === 'href rel target title' && each.protocol === 'https:';
          const isPlain = PLAIN.includes(each.localName) && ['', 'tabindex', 'class tabindex'].includes(names);
          return isLink || isPlain ? [] : [each.outerHTML];
        });
      })
    """

    assert await rendered(page, list(HOSTILE), found.replace("PLAIN", json.dumps(PLAIN))) == []
    assert page.problems == []
    assert all(url.startswith(f"http://127.0.0.1:{gateway.port}/") for url in page.fetched)


async def test_streamed_text_is_shown_like_complete_text(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    texts = [*CASES, *HOSTILE, "foo\n---\nbar\n---x", "foo\na|b\n-|-\n1|2", "- a\n\n\n- b\n\nc\n\n1. d\n   ```\n   e"]
    # Every character by itself, each rendered at once: the timer of the page is replaced by a call.
    differ = """
      (async () => {
        const { Markdown } = await import('/page/markdown.js');
        const later = window.setTimeout;
        const show = (pieces) => {
          const place = document.createElement('div');
          const shown = new Markdown(place);
          for (const piece of pieces) shown.push(piece);
          shown.finish();
          return place.innerHTML;
        };
        return TEXTS.filter((text) => {
          const whole = show([text]);
          window.setTimeout = (call) => { call(); return 0; };
          try { return show([...text]) !== whole; } finally { window.setTimeout = later; }
        });
      })()
    """.replace("TEXTS", json.dumps(texts))

    assert await page.evaluate(differ) == []


async def test_long_text_takes_bounded_time_complete_and_streamed(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    spent = """
      (async () => {
        const { Markdown } = await import('/page/markdown.js');
        const begun = (place) => { document.body.append(place); return new Markdown(place); };
        const spent = {};
        for (const [name, text] of Object.entries(TEXTS)) {
          const once = document.createElement('div');
          let began = performance.now();
          const whole = begun(once);
          whole.push(text);
          whole.finish();
          const atOnce = performance.now() - began;
          once.remove();
          const place = document.createElement('div');
          began = performance.now();
          const shown = begun(place);
          for (let at = 0; at < text.length; at += 200) {
            shown.push(text.slice(at, at + 200));
            if (at % 10_000 === 0) await new Promise((go) => setTimeout(go, 0));
          }
          shown.finish();
          spent[name] = [Math.round(atOnce), Math.round(performance.now() - began)];
          place.remove();
        }
        return spent;
      })()
    """
    took: dict[str, list[int]] = {}
    for name, text in LONG.items():
        took |= await page.evaluate(spent.replace("TEXTS", json.dumps({name: text})))

    assert {name: ms for name, ms in took.items() if ms[0] > ONE_PIECE_MS or ms[1] > STREAMED_MS} == {}


async def test_answer_is_shown_with_its_marks_as_it_streams(page: Page, gateway: Gateway) -> None:
    gateway.says("# Title\n\n- **one**\n- two\n\n```\nx\n```")
    await visit(page, gateway.port)

    await page.type("#question", "*Hi*")

    await page.until(f"{ANSWER}.includes('tokens')")
    for selector in ("h3", "li strong", "pre code"):
        assert await page.evaluate(count(f".assistant .markdown {selector}")) == 1, selector
    assert await page.evaluate("document.querySelector('.user').innerHTML") == "*Hi*"
