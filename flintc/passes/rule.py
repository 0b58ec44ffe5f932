"""Fusion rules: a pattern, what must hold besides, and how its values cross once the ops share a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flintc.ir.graph import Attr, Crossing, CrossingKind, Graph, Op
from flintc.ir.types import DType
from flintc.passes.pattern import Given, Match, Node, Port, find


@dataclass(frozen=True)
class Guard:
    """A condition on a match; ``says`` reads on from "refused, since it is not so that"."""

    says: str
    holds: Callable[[Match], bool]


def rank(port: Port, dimensions: int) -> Guard:
    """The value at ``port`` has this many dimensions: the axis that is reduced is the one the rule means."""
    return Guard(f"{port} has {dimensions} dimensions", lambda m: len(m.type(port).shape) == dimensions)


def dtype(port: Port, wanted: DType) -> Guard:
    """The value at ``port`` has this element type."""
    return Guard(f"{port} is {wanted}", lambda m: m.type(port).dtype == wanted)


def same_dtype(a: Port, b: Port) -> Guard:
    """Both values have one element type, so that one launch reads one format."""
    return Guard(f"{a} and {b} have one element type", lambda m: m.type(a).dtype == m.type(b).dtype)


def same_attrs(a: Node, b: Node, *names: str) -> Guard:
    """Both ops agree on these attributes."""

    def agree(m: Match) -> bool:
        def values(node: Node) -> list[Attr]:
            return [m.attr(node, name) for name in names]

        return values(a) == values(b)

    return Guard(f"{a.kind} and {b.kind} agree on {', '.join(names)}", agree)


@dataclass(frozen=True)
class Cross:
    """How the value at ``port`` crosses inside the launch; ``kept``: readers outside are welcome too."""

    port: Port
    kind: CrossingKind
    group: str | None = None
    kept: bool = False


def local(port: Port) -> Cross:
    """In the registers of one program."""
    return Cross(port, "local")


def recompute(port: Port, *, kept: bool = False) -> Cross:
    """Evaluated by every program that needs it; where ``kept``, one of them writes it for readers outside."""
    return Cross(port, "recompute", kept=kept)


def last_arriver(port: Port, by: str) -> Cross:
    """Through memory, to the last program of its group."""
    return Cross(port, "last-arriver", group=by)


@dataclass(frozen=True)
class Rule:
    """Ops that are to share a launch of ``role``.

    ``ops`` lists the pattern, each op after the first making what an earlier one reads, or reading what an earlier one
    makes or reads. Every value that crosses is in ``crosses``. Readers outside the launch are refused unless the
    crossing is ``kept``: a fused value has no place in memory for them.
    """

    name: str
    why: str
    role: str
    ops: tuple[Node, ...]
    crosses: tuple[Cross, ...]
    guards: tuple[Guard, ...] = ()

    def __post_init__(self) -> None:
        known: set[Node | Given] = set()
        for i, node in enumerate(self.ops):
            linked = {s.node if isinstance(s, Port) else s for s in node.reads.values()}
            assert i == 0 or node in known or linked & known, f"{self.name}: {node.kind} hangs on no earlier op"
            known |= {node, *linked}

    def __add__(self, other: Rule | Rules) -> Rules:
        return Rules((self,)) + other

    def crossings(self, match: Match) -> tuple[Crossing, ...]:
        """The crossings of the launch that ``match`` becomes."""
        return tuple(Crossing(match.value(c.port), c.kind, c.group) for c in self.crosses)

    def refusal(self, match: Match) -> str | None:
        """Why ``match`` may not be fused; None if it may."""
        for guard in self.guards:
            if not guard.holds(match):
                return f"not so: {guard.says}"
        return self._outside_reader(match) or self._unstated_edge(match) or self._shared_launch(match)

    def _outside_reader(self, match: Match) -> str | None:
        for cross in self.crosses:
            value = match.value(cross.port)
            readers = set(match.graph.consumers[value])
            if not cross.kept and (readers - match.names or value in match.graph.outputs):
                return f"{cross.port} has another reader"
        return None

    def _unstated_edge(self, match: Match) -> str | None:
        """Whether the matched ops read each other in a way that the pattern does not show, and no crossing covers."""
        stated = {
            (match.value(source), match.ops[node].name)
            for node in self.ops
            for source in node.reads.values()
            if isinstance(source, Port)
        }
        for op in match.ops.values():
            for value in op.outputs:
                inside = match.names & set(match.graph.consumers[value])
                if any((value, reader) not in stated for reader in inside):
                    return "its ops read each other in another way besides"
        return None

    @staticmethod
    def _shared_launch(match: Match) -> str | None:
        launches = {match.graph.launch_of[o].name: match.graph.launch_of[o] for o in match.names}
        if len(launches) == 1:
            return "its ops share a launch already"
        held = {o for launch in launches.values() for o in launch.ops}
        return None if held == match.names else "its ops share a launch with others"


@dataclass(frozen=True)
class Rules:
    """Rules in order of preference; sets of rules add."""

    rules: tuple[Rule, ...]

    def __add__(self, other: Rule | Rules) -> Rules:
        return Rules(self.rules + (other.rules if isinstance(other, Rules) else (other,)))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)


@dataclass
class RuleCount:
    """What became of one rule in one run: anchors tried, matches fused, matches refused by reason."""

    rule: str
    tried: int = 0
    matched: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Found:
    """A match that may be fused, and the rule that found it."""

    rule: Rule
    match: Match


def search(graph: Graph, rules: Rules) -> tuple[list[Found], list[RuleCount]]:
    """Every place of ``graph`` that a rule may fuse; an op is taken once, by the first rule that can have it."""
    taken: set[str] = set()
    found: list[Found] = []
    counts = []
    for rule in rules:
        count = RuleCount(rule.name)
        counts.append(count)
        for anchor in _anchors(graph, rule, taken):
            count.tried += 1
            match = _first_allowed(graph, rule, anchor, taken, count)
            if match is not None:
                count.matched += 1
                taken |= match.names
                found.append(Found(rule, match))
    return found, counts


def _anchors(graph: Graph, rule: Rule, taken: set[str]) -> Iterator[Op]:
    for op in graph.ops.values():
        if op.kind == rule.ops[0].kind and op.name not in taken:
            yield op


def _first_allowed(graph: Graph, rule: Rule, anchor: Op, taken: set[str], count: RuleCount) -> Match | None:
    """The first match at ``anchor`` that nothing speaks against; refusals are counted where there is none."""
    reasons: list[str] = []
    for match in find(graph, rule.ops, anchor):
        reason = "its ops are taken" if match.names & taken else rule.refusal(match)
        if reason is None:
            return match
        reasons.append(reason)
    count.refused.update(reasons[:1])
    return None
