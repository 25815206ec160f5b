"""A chat template that never ends, or whose text has no bound, is stopped after a number of steps; errors name the
template and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reference_impl.features.chat.sandbox import MAX_STEPS, ChatTemplateError, Sandbox, render
from tests.features.chat.conversations import CONVERSATIONS, WEATHER

FOLDER = Path(__file__).parent / "templates"
FEW = 20_000  # steps; more differ from these in nothing but time
NESTED = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"


def grown(step: str, begin: str = "'x'") -> str:
    """What `step` makes of n.a, a hundred times."""
    return f"{{% set n = namespace(a={begin}) %}}{{% for i in range(100) %}}{{% set n.a = {step} %}}{{% endfor %}}"


@pytest.mark.parametrize(
    "template",
    [
        NESTED,
        "{% for i in range(9) %}{% for j in range(10**5) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(10**5) recursive %}{{ loop(range(10**5)) if loop.depth < 3 }}{% endfor %}",
        "{% for i in range(10**4) %}" + "x" * 1000 + "{% endfor %}",
        "{% set s = 'x' * 10**5 %}{% for i in range(10**4) %}{{ s }}{% endfor %}",
        "{% set s = 'x' * 10**5 %}{% for i in range(10**4) %}{% set t = s[1:] %}{% endfor %}",
        "{% set s = 'x' * 10**5 %}{% for i in range(10**4) %}{{ 'y' if s in s }}{% endfor %}",
        "{% set s = 'x' * 10**5 %}{% for i in range(10**4) %}{% set t = s.upper() %}{% endfor %}",
        "{% set s = 'x' * 10**5 %}{% for i in range(10**4) %}{% set t = s|lower %}{% endfor %}",
        "{% set l = range(10**4)|list %}{% for i in l %}{% set t = l|sum %}{% endfor %}",
        "{{ ([range(10**5)] * 9)|map('list')|list }}",
        grown("n.a ~ n.a"),
        grown("n.a + n.a"),
        grown("n.a * 3"),
        grown("n.a|replace('x', 'xx')"),
        grown("n.a.replace('x', 'xx')"),
        grown("n.a.join([n.a, n.a])"),
        grown("[n.a, n.a]|join(n.a)"),
        grown("'%s%s' % (n.a, n.a)"),
        grown("'{0}{0}'.format(n.a)"),
        grown("'%s%s'|format(n.a, n.a)"),
        grown("[n.a, n.a]"),
        grown("(n.a, n.a)"),
        grown("{'a': n.a, 'b': n.a}"),
        grown("dict(a=n.a, b=n.a)"),
        grown("[n.a] * 2", "[1]"),
        grown("{'a': n.a.items(), 'b': n.a.items()}", "{}"),
        grown("{'a': n.a.values(), 'b': n.a.values()}", "{}"),
        grown("{(n.a, n.a): 1}|list|first", "(1,)"),
        grown("n.a + n.a", "[1]"),
        grown("n.a * n.a", "3"),
        "{{ 'x' * 10**12 }}",
        "{{ 10**(10**10) }}",
        "{{ 'x'|center(10**12) }}",
        "{{ 'x'.ljust(10**12) }}",
        "{{ 'x'.zfill(10**12) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ ('x' * 10**5).translate({120: 'y' * 10**5}) }}",
        "{{ 'x\\nx'|indent(10**9) }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '%*d' % (10**9, 5) }}",
        "{{ '{:{}}'.format(5, 10**9) }}",
        "{{ '{:1000000000}'.format(5) }}",
        "{{ '{a:1000000000}'.format_map({'a': 5}) }}",
        "{{ range(10**5)|join('y' * 10**5) }}",
        "{{ range(10**4)|map('string')|join('y' * 10**4) }}",
        "{{ ('y' * 10**4).join(range(10**4)|map('string')) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ [[1]]|tojson(indent=10**9) }}",
        "{{ [1, 2]|tojson(separators=('x' * 10**6, '')) }}",
        "{{ 2.5|round(10**9, 'ceil') }}",
        "{{ lipsum(n=10**9) }}",
    ],
)
def test_what_has_no_end_is_stopped(template: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"line 1.*does not end within {FEW:,} steps"):
        render(template, {}, "T", FEW)


def test_the_limit_is_counted_and_the_same_everywhere() -> None:
    template = "{% for i in range(1000) %}{{ i }}{% endfor %}"
    sandbox = Sandbox(MAX_STEPS)
    source = sandbox.from_string(template)
    source.render()
    assert 2000 <= sandbox.steps <= 6000
    assert render(template, {}, "T", sandbox.steps) == "".join(map(str, range(1000)))
    with pytest.raises(ChatTemplateError):
        render(template, {}, "T", sandbox.steps - 1)


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.jinja")))
def test_a_long_conversation_is_far_from_the_limit(name: str) -> None:
    """1,000 turns and half a million characters, more than most models read."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " * 200} for i in range(1000)]
    variables = {"messages": messages, "tools": [WEATHER] * 20, "bos_token": "", "eos_token": "", "documents": None,
                 "add_generation_prompt": True}  # fmt: skip
    render((FOLDER / f"{name}.jinja").read_text("utf-8"), variables, name, MAX_STEPS // 3)


def test_numbers_that_only_look_long_are_no_lengths() -> None:
    template = "{{ 1700000000|string }}{{ 1700000000|tojson }}{{ 1700000000 * 1000 }}{{ '%s'|format(1700000000) }}"
    assert render(template, {}, "T", FEW) == "1700000000" * 2 + "1700000000000" + "1700000000"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n\n{{ 1 / 0 }}", "T, line 3: the chat template fails: ZeroDivisionError"),
        ("a\n{{ raise_exception('no tools') }}", "T, line 2: the chat template refuses these messages: no tools"),
        ("\n\n{% macro f() %}\n{{ x.y }}\n{% endmacro %}{{ f() }}", "T, line 4: .*UndefinedError: 'x' is undefined"),
        ("\n{{ messages[0].content + 1 }}", "T, line 2: .*TypeError"),
        ("a\n{% if %}", "T, line 2: no Jinja template: Expected an expression"),
        ("{{ a|nofilter }}", "T, line 1: no Jinja template: No filter named 'nofilter'"),
        ("\n{% include 'x' %}", "T, line 2: .*no loader"),
        ("\n{% for i in range(10**9) %}{% endfor %}", "T, line 2: .*Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "T, line 1: .*nests too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "T: no Jinja template"),
        ("{{ ''.__class__.__mro__ }}", "T, line 1: .*SecurityError"),
        ("{{ messages.append(1) }}", "T, line 1: .*SecurityError"),
        ("{{ 'x'.encode() }}", "T, line 1: .*SecurityError"),
        ("{{ (5).to_bytes(10**9, 'big') }}", "T, line 1: .*SecurityError"),
        ("{{ namespace(_a=1) }}", "T, line 1: .*underscore"),
        ("\n{{ 'x' | strftime_now }}", "T, line 2: no Jinja template"),
    ],
)
def test_an_error_names_the_template_and_the_line(template: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        render(template, {"messages": CONVERSATIONS["user"]}, "T")


def test_what_a_namespace_holds_is_not_shown() -> None:
    template = grown("namespace(a=n.a, b=n.a)") + "{{ n.a }}{{ [n] }}"
    assert render(template, {}, "T", FEW) == "<Namespace>[<Namespace>]"


def test_a_template_changes_nothing_that_it_is_given() -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert render("{% set messages = messages + [1] %}{{ messages | length }}", given, "T") == "2"
    assert given == {"messages": [{"role": "user", "content": "x"}]}
