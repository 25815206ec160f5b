"""The accept/reject stepper: one draft, three uniform numbers, and what each of them decides.

Shares and the residual are those of `theory.speculative`; drawing reads them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ipywidgets import FloatSlider, IntSlider

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, SKY, Shown, View, figure, show
from reference_impl.theory.speculative import acceptance, residual

STEPS = ("nothing drawn yet", "u1 draws the draft from q", "u2 keeps it or not", "u3 draws what stands in its place")


def pick(probs: np.ndarray, u: float) -> int:
    """The token whose stretch of [0, 1) holds u, as the sampler draws."""
    sums = np.cumsum(probs)
    return int(min(np.searchsorted(sums, u * sums[-1], side="right"), np.flatnonzero(probs)[-1]))


def draw(
    p: np.ndarray, q: np.ndarray, names: Sequence[str], step: int, u_guess: float, u_keep: float, u_rest: float
) -> Shown:
    """Left: p and q over the vocabulary, what they share hatched. Middle: the draft's own bar, cut by u2. Right: the
    residual, cut by u3."""
    equal = bool(np.allclose(p, q))
    rest = None if equal else residual(p, q)
    guess = pick(q, u_guess) if step >= 1 else None
    kept = guess is not None and bool(u_keep * q[guess] < p[guess])
    given = pick(rest, u_rest) if step >= 3 and not kept and rest is not None else None
    text = _in_words(p, q, names, step, guess, kept, given, u_keep)
    fig = figure(8.4, 3.3)
    fig.set_layout_engine("none")
    _both(fig.add_axes((0.06, 0.16, 0.40, 0.60)), p, q, names, guess)
    _guess(fig.add_axes((0.53, 0.16, 0.14, 0.60)), p, q, guess, u_keep if step >= 2 else None)
    _rest(fig.add_axes((0.75, 0.16, 0.23, 0.60)), rest, names, given, u_rest if step >= 3 and not kept else None)
    fig.text(0.01, 0.975, text, va="top", fontsize=9, color=INK)
    return show(fig, " ".join(text.split()))


def _both(ax: Any, p: np.ndarray, q: np.ndarray, names: Sequence[str], guess: int | None) -> None:
    at = np.arange(len(p))
    ax.bar(at - 0.2, p, 0.4, color=BLUE, label="p, the target")
    ax.bar(at + 0.2, q, 0.4, color=ORANGE, label="q, the draft")
    for shift in (-0.2, 0.2):
        label = "hatched: min(p, q), kept" if shift < 0 else None
        ax.bar(at + shift, np.minimum(p, q), 0.4, facecolor="none", edgecolor="white", hatch="///", lw=0, label=label)
    if guess is not None:
        ax.plot(guess + 0.2, q[guess] + 0.03 * max(p.max(), q.max()), "v", color=INK, markersize=8)
    ax.set_xticks(at, names, fontsize=8)
    ax.set_ylim(0, 1.42 * float(max(p.max(), q.max())))
    ax.legend(fontsize=7.5, frameon=False, ncols=3, loc="upper left", columnspacing=0.8, handlelength=1.4)
    _plain(ax, "probability")


def _guess(ax: Any, p: np.ndarray, q: np.ndarray, guess: int | None, u: float | None) -> None:
    ax.set_title("the draft", fontsize=8.5, loc="left")
    ax.set_ylim(0, 1)
    ax.set_xticks([])
    if guess is not None:
        share = min(1.0, float(p[guess] / q[guess]))
        ax.bar([0], [share], 0.6, color=SKY, hatch="///", edgecolor="white")
        ax.bar([0], [1 - share], 0.6, bottom=[share], color=GREY)
        ax.text(0, share / 2, "kept", ha="center", va="center", fontsize=8, bbox=_PAPER)
        if share < 0.9:
            ax.text(0, (1 + share) / 2, "rejected", ha="center", va="center", fontsize=8, bbox=_PAPER)
        if u is not None:
            ax.axhline(u, color=INK, linewidth=2)
            ax.text(0.42, u + 0.02, "u2", fontsize=8, va="bottom", ha="left")
    ax.set_xlim(-0.4, 0.6)
    _plain(ax, "u2 against p(x) / q(x)")


def _rest(ax: Any, rest: np.ndarray | None, names: Sequence[str], given: int | None, u: float | None) -> None:
    ax.set_title("residual", fontsize=8.5, loc="left")
    ax.set_xlim(0, 1)
    ax.set_yticks([])
    if rest is None:
        ax.text(0.5, 0.5, "p = q: none", ha="center", va="center", fontsize=8.5)
    else:
        left = 0.0
        for token, share in enumerate(rest):
            if share > 0:
                colour = GREEN if token == given else GREY
                ax.barh([0], [share], 0.6, left=[left], color=colour, edgecolor="white")
                if share > 0.1:  # in a narrower one its name would lie over its neighbours
                    ax.text(left + share / 2, 0, names[token], ha="center", va="center", fontsize=8, bbox=_PAPER)
                left += float(share)
        if u is not None:
            ax.axvline(u, color=INK, linewidth=2)
            ax.text(u + 0.02, 0.37, "u3", fontsize=8, ha="left")
        ax.set_ylim(-0.5, 0.5)
    ax.spines[["left"]].set_visible(False)
    _plain(ax, "", "max(p − q, 0) / its sum")


_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}


def _plain(ax: Any, ylabel: str, xlabel: str = "") -> None:
    ax.tick_params(labelsize=8)
    ax.set_ylabel(ylabel, fontsize=8)
    ax.set_xlabel(xlabel, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _in_words(
    p: np.ndarray, q: np.ndarray, names: Sequence[str], step: int, guess: int | None, kept: bool, given: int | None,
    u_keep: float,
) -> str:  # fmt: skip
    share = acceptance(p, q)
    head = f"Over all drafts: kept {share:.1%}, rejected {1 - share:.1%} = sum of max(p − q, 0)."
    if guess is None:
        return f"{head}\nStep 0: {STEPS[0]}."
    lines = [head, f"Step {step}: {STEPS[step]}. Draft {names[guess]!r}: p = {p[guess]:.3f}, q = {q[guess]:.3f}"]
    if step >= 2:
        ratio, sign = p[guess] / q[guess], "<" if kept else "≥"
        lines[-1] += f"; u2 = {u_keep:.2f} {sign} p/q = {ratio:.2f}: {'kept' if kept else 'rejected'}"
    if step >= 3:
        lines[-1] += (
            ", so u3 is not used." if kept else f"; {names[given or 0]!r} comes out." if given is not None else ""
        )
    return "\n".join(lines)


def accept_reject(
    p: Sequence[float], q: Sequence[float], names: Sequence[str], step: int = 3, u: Sequence[float] = (0.75, 0.8, 0.4)
) -> View:
    """Step through one draft: u1 draws it from q, u2 keeps it or not, u3 draws from the residual.

    p, q: probabilities over the same tokens, each of sum 1 and q above 0 for some; names: a label for each token.
    """
    target, draft = np.asarray(p, float), np.asarray(q, float)
    for name, probs in (("p", target), ("q", draft)):
        if probs.shape != (len(names),) or np.any(probs < 0) or abs(probs.sum() - 1) > 1e-6:
            raise ValueError(f"{name}: expected {len(names)} probabilities of sum 1, got {probs.tolist()}")
    wide, layout = {"description_width": "150px"}, {"width": "480px"}

    def slider(value: float, label: str) -> FloatSlider:
        return FloatSlider(
            value, min=0.0, max=0.99, step=0.01, description=label, style=wide, layout=layout, continuous_update=False
        )

    return View(
        {
            "step": IntSlider(step, 0, 3, description="Step", style=wide, layout=layout, continuous_update=False),
            "u_guess": slider(u[0], "u1 (which draft)"),
            "u_keep": slider(u[1], "u2 (kept or not)"),
            "u_rest": slider(u[2], "u3 (what instead)"),
        },
        lambda **values: draw(target, draft, names, **values),
    )
