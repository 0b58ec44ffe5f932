"""A plan read from a file may say anything: it is refused by name, or proved, never a crash."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from sound_plans import SPECS, the_whole_of

from flintc.errors import BundleError, VerificationError
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.ir.verify import verify
from flintc.safety import check_plan


def places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside ``data``."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((data, key), *places(value))]


def damaged(text: str, random: Random) -> Any:
    """One thing in the plan becomes another that stands elsewhere in it, or is left out."""
    data = json.loads(text)
    parts = [*data["launches"], *data["kernels"], *data["buffers"], data["placement"], *data["graph"]["launches"]]
    parts += [*data["graph"]["ops"], *data["graph"]["values"]]
    container, key = random.choice(places(random.choice(parts)) or [(data["graph"], "outputs")])
    if isinstance(container, list) and random.random() < 0.3:
        del container[key]
        return data
    like = [c[k] for c, k in places(data["launches"] + data["kernels"] + data["graph"]["values"])]
    container[key] = random.choice([x for x in like if type(x) is type(container[key])] or [None])
    return data


@pytest.mark.parametrize("kind", ["joined", "cut"])
def test_damage_is_refused_or_harmless(kind: str) -> None:
    text = json.dumps(plan_to_json(the_whole_of(SPECS[0], kind)))
    verdicts: Counter[str] = Counter()
    random = Random(0)
    for _ in range(250):
        try:
            plan = plan_from_json(damaged(text, random))
            verify(plan.graph)
            check_plan(plan)
        except (BundleError, VerificationError) as error:
            assert error.message
            verdicts[type(error).__name__] += 1
        else:
            verdicts["proved"] += 1
    assert set(verdicts) == {"BundleError", "VerificationError", "proved"}
