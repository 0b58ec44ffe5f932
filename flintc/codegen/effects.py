"""What a kernel's source does to memory and to the chain of dependent launches, read off its text.

The text that is compiled is the one statement of what stands above the wait: nothing is declared beside it that could
differ. Reading is abstract interpretation of the little Python that kernels use: of each expression it keeps which
parameters it may point into and which memory it was computed from. Helpers are followed. A path is split where a
condition decides about a wait or a return of the entry; any other condition only guards what it encloses.

The compiled code is held against the same statement by :mod:`flintc.codegen.lint`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from flintc.codegen.facts import NOTHING, Fact, Value, computed, dotted, either, joined, merged
from flintc.errors import VerificationError
from flintc.ir.plan import Effect, EffectKind, Param, Path

_WAIT, _TRIGGER = "tl.extra.cuda.gdc_wait", "tl.extra.cuda.gdc_launch_dependents"

#: The one helper that may use atomics: the last of a group of programs to call it, and no other, is told so.
_ARRIVE = "arrive_last"

#: The helper that tells the first position that a step writes of a sequence, and the one whose load stays before it.
_FIRST, _EARLIER = "first_of_step", "load_earlier"

#: Functions of Triton that hand a pointer on without following it.
_HAND_ON = frozenset(
    {"tl.where", "tl.broadcast_to", "tl.expand_dims", "tl.reshape", "tl.permute", "tl.multiple_of", "tl.max_contiguous"}
)

#: More paths than any kernel that a person can follow.
_MOST_PATHS = 64

_SYNCHRONISING = ("wait", "trigger", "arrive")

Env = dict[str, Value]


def effects_of(
    source: str, entry: str, params: Sequence[Param], constants: Mapping[str, int | float | bool]
) -> tuple[Path, ...]:
    """The paths of ``entry`` in ``source``; VerificationError, with the line, where its effects cannot be told."""
    module = ast.parse(source)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    calls = {name: {dotted(n.func) for n in ast.walk(f) if isinstance(n, ast.Call)} for name, f in functions.items()}
    waiting = _reaching(calls, {_WAIT, _TRIGGER})
    synchronising = _reaching(calls, {_WAIT, _TRIGGER, _ARRIVE})
    paths: dict[Path, None] = {}
    pending: list[tuple[bool, ...]] = [()]
    for _ in range(_MOST_PATHS):
        run = _Run(entry, functions, waiting, synchronising, pending.pop())
        env: Env = {p.name: Fact(pointers=frozenset({p.name})) if p.type.startswith("*") else NOTHING for p in params}
        env |= {name: Fact(flag=value) if isinstance(value, bool) else NOTHING for name, value in constants.items()}
        run.globals(module)
        run.enter(env)
        paths[_distinct(run.effects)] = None
        pending += run.untaken
        if not pending:
            return tuple(paths)
    raise VerificationError(f"kernel {entry}: more than {_MOST_PATHS} paths through its waits and returns")


def _reaching(calls: Mapping[str, set[str]], found: set[str]) -> frozenset[str]:
    """``found``, and the functions that reach one of these through what they call."""
    while more := {name for name, called in calls.items() if name not in found and not called.isdisjoint(found)}:
        found = found | more
    return frozenset(found)


def _distinct(effects: Sequence[Effect]) -> Path:
    """``effects`` without repetitions between one synchronisation and the next."""
    kept: list[Effect] = []
    since: set[Effect] = set()
    for effect in effects:
        if effect.kind in _SYNCHRONISING:
            since.clear()
        elif effect in since:
            continue
        since.add(effect)
        kept.append(effect)
    return tuple(kept)


@dataclass
class _Frame:
    """A call in progress: its variables, and what it returned so far."""

    env: Env
    returned: list[Value] = field(default_factory=list)


@dataclass
class _Run:
    """One walk through the entry, taking ``decisions`` at the conditions that split paths, then True at each."""

    entry: str
    functions: Mapping[str, ast.FunctionDef]
    #: Functions that wait or trigger, and those that do or arrive at a counter, themselves or in what they call.
    waiting: frozenset[str]
    synchronising: frozenset[str]
    decisions: tuple[bool, ...]
    effects: list[Effect] = field(default_factory=list)
    #: Decisions of the other paths that begin like this one.
    untaken: list[tuple[bool, ...]] = field(default_factory=list)
    _module: Env = field(default_factory=dict)
    _calls: list[str] = field(default_factory=list)
    _taken: list[bool] = field(default_factory=list)
    _guards: frozenset[str] = frozenset()
    _last: tuple[str, ...] = ()
    #: Conditions and loops around, beyond those that split paths.
    _inside: int = 0
    _silent: int = 0

    def globals(self, module: ast.Module) -> None:
        """Take note of the module's constants."""
        frame = _Frame(self._module)
        for node in module.body:
            if isinstance(node, ast.AnnAssign):
                self._statement(node, frame)

    def enter(self, env: Env) -> None:
        """Walk the entry."""
        if self.entry not in self.functions:
            raise VerificationError(f"the source defines no kernel {self.entry}")
        self._calls.append(self.entry)
        self._block(self.functions[self.entry].body, _Frame(dict(env)))

    # Statements: True once the call surely returned.

    def _block(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        return any(self._statement(statement, frame) for statement in body)

    def _statement(self, node: ast.stmt, frame: _Frame) -> bool:
        match node:
            case ast.Assign(targets=[target]):
                self._assign(target, self._value(node.value, frame), frame)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, self._value(value, frame), frame)
            case ast.AugAssign(target=ast.Name(id=name)):
                old = frame.env.get(name, NOTHING)
                frame.env[name] = joined((old, self._value(node.value, frame)))
            case ast.Expr():
                self._value(node.value, frame)
            case ast.If():
                return self._if(node, frame)
            case ast.For(orelse=[]):
                self._for(node, frame)
            case ast.Return():
                frame.returned.append(NOTHING if node.value is None else self._value(node.value, frame))
                return True
            case ast.Pass():
                pass
            case _:
                self._fail(node, f"a statement {type(node).__name__} is not understood")
        return False

    def _assign(self, target: ast.expr, value: Value, frame: _Frame) -> None:
        match target:
            case ast.Name(id=name):
                frame.env[name] = value
            case ast.Tuple(elts=targets):
                parts = value if isinstance(value, tuple) else (value,) * len(targets)
                if len(parts) != len(targets):
                    self._fail(target, f"{len(parts)} values for {len(targets)} names")
                for part, each in zip(targets, parts, strict=True):
                    self._assign(part, each, frame)
            case _:
                self._fail(target, "an assignment to something other than names is not understood")

    def _if(self, node: ast.If, frame: _Frame) -> bool:
        test = joined((self._value(node.test, frame),))
        if test.flag is not None:
            return self._block(node.body if test.flag else node.orelse, frame)
        if self._splits(node, test):
            taken = self._decide()
            # What follows on this path is done for those only that came this way.
            self._guards |= test.data
            with self._under(Fact(last=test.last if taken else None)):
                return self._block(node.body if taken else node.orelse, frame)
        before = dict(frame.env)
        with self._under(test, inside=True):
            one = self._block(node.body, frame)
        after, frame.env = frame.env, before
        with self._under(replace(test, last=None), inside=True):
            other = self._block(node.orelse, frame)
        if not one:
            frame.env = after if other else merged(after, frame.env)
        return one and other

    def _for(self, node: ast.For, frame: _Frame) -> None:
        over = joined((self._value(node.iter, frame),))
        with self._under(replace(over, last=None), inside=True):
            before: Env = {}
            while before != frame.env:  # what one turn of the loop hands to the next
                before = dict(frame.env)
                self._turn(node, over, frame, silent=True)
                frame.env = merged(before, frame.env)
            self._turn(node, over, frame, silent=False)
            frame.env = merged(before, frame.env)

    def _turn(self, node: ast.For, over: Fact, frame: _Frame, silent: bool) -> None:
        """One turn of a loop; a silent one leaves no effects."""
        if not silent and self._silent:
            return
        self._silent += silent
        self._assign(node.target, Fact(data=over.data), frame)
        if self._block(node.body, frame):
            self._fail(node, "a return inside a loop is not understood")
        self._silent -= silent

    def _splits(self, node: ast.If, test: Fact) -> bool:
        """Whether ``node``, standing in the entry itself, decides about a synchronisation or a return.

        Who comes last at a counter is no program of another kind: it has arrived like the others.
        """
        if len(self._calls) > 1 or self._inside:
            return False
        nodes = [n for statement in (*node.body, *node.orelse) for n in ast.walk(statement)]
        called = {dotted(n.func) for n in nodes if isinstance(n, ast.Call)}
        deciding = self.synchronising if test.last is None else self.waiting
        return not called.isdisjoint(deciding) or any(isinstance(n, ast.Return) for n in nodes)

    def _decide(self) -> bool:
        at = len(self._taken)
        if at == len(self.decisions):
            self.untaken.append((*self._taken, False))
            self.decisions += (True,)
        self._taken.append(self.decisions[at])
        return self.decisions[at]

    @contextmanager
    def _under(self, test: Fact, inside: bool = False) -> Iterator[None]:
        """Within a condition or loop over ``test``."""
        saved = self._guards, self._last, self._inside
        if inside:
            self._guards |= test.data
            self._inside += 1
        self._last = test.last if test.last is not None else self._last
        yield
        if inside:
            self._guards = saved[0]
        _, self._last, self._inside = saved

    # Expressions.

    def _value(self, node: ast.expr, frame: _Frame) -> Value:
        match node:
            case ast.Constant(value=value):
                return Fact(flag=value) if isinstance(value, bool) else NOTHING
            case ast.Name(id=name):
                return frame.env.get(name, self._module.get(name, NOTHING))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self._value(e, frame) for e in elements)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                fact = joined((self._value(operand, frame),))
                return replace(computed(fact), flag=None if fact.flag is None else not fact.flag)
            case ast.BoolOp(op=ast.And()) | ast.BinOp(op=ast.BitAnd()):
                operands = node.values if isinstance(node, ast.BoolOp) else [node.left, node.right]
                return either([self._value(o, frame) for o in operands])
            case ast.Call():
                return self._call(node, frame)
            case ast.Attribute(attr="shape" | "dtype"):
                return NOTHING
            case (
                ast.BinOp() | ast.BoolOp() | ast.UnaryOp() | ast.Compare() | ast.Subscript() | ast.Slice()
                | ast.Attribute() | ast.IfExp()
            ):  # fmt: skip
                inner = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
                return computed(joined([self._value(c, frame) for c in inner]))
            case _:
                self._fail(node, f"an expression {type(node).__name__} is not understood")

    def _call(self, node: ast.Call, frame: _Frame) -> Value:
        name = dotted(node.func)
        args = [self._value(a, frame) for a in node.args]
        named = {k.arg or "": self._value(k.value, frame) for k in node.keywords}
        if name in self.functions:
            return self._enter_helper(node, self.functions[name], args, named)
        if name in (_WAIT, _TRIGGER):
            self._record(Effect("wait" if name == _WAIT else "trigger", sure=not self._inside))
            return NOTHING
        if name == "tl.load":
            pointer = joined((args[0],))
            mask = joined((named.get("mask", args[1] if len(args) > 1 else NOTHING),))
            others = joined((named.get("other", NOTHING),))
            earlier = joined((frame.env["first"],)).first if self._calls[-1] == _EARLIER else ()
            self._access(node, "read", pointer, mask, earlier)
            return Fact(data=pointer.pointers | pointer.data | mask.data | others.data)
        if name == "tl.store":
            mask = joined((named.get("mask", args[2] if len(args) > 2 else NOTHING),))
            zero = isinstance(node.args[1], ast.Constant) and node.args[1].value == 0
            self._access(node, "reset" if zero and self._calls[-1] == _ARRIVE else "write", joined((args[0],)), mask)
            return NOTHING
        if name.startswith("tl.atomic_"):
            if self._calls[-1] != _ARRIVE:
                self._fail(node, f"{name} outside {_ARRIVE}")
            pointer = joined((args[0],))
            self._access(node, "arrive", pointer, NOTHING)
            return Fact(data=pointer.pointers)
        if name == "tl.inline_asm_elementwise":
            return self._assembly(node, joined((*args, *named.values())))
        return self._other(node, name, [*args, *named.values()], frame)

    def _other(self, node: ast.Call, name: str, args: list[Value], frame: _Frame) -> Value:
        """A function that touches no memory, or a method of a value."""
        result = joined(args)
        if name == "tl.constexpr":
            return result
        if isinstance(node.func, ast.Attribute) and not name.startswith(("tl.", "triton.")):
            base = joined((self._value(node.func.value, frame),))
            if base.pointers and node.func.attr != "to":
                self._fail(node, f"cannot tell what .{node.func.attr}() does with a pointer")
            result = joined((base, result))
        elif result.pointers and name not in _HAND_ON:
            self._fail(node, f"cannot tell what {name} does with a pointer")
        return computed(result)

    def _enter_helper(
        self, node: ast.Call, function: ast.FunctionDef, args: list[Value], named: dict[str, Value]
    ) -> Value:
        if function.name in self._calls:
            self._fail(node, f"{function.name} calls itself")
        names = [a.arg for a in function.args.args]
        frame = _Frame(dict(zip(names, args, strict=False)) | named)
        if function.name == _ARRIVE:
            return self._arrive(node, function, joined((frame.env[names[0]],)).pointers, frame)
        if function.name == _EARLIER and not joined((frame.env["first"],)).first:
            self._fail(node, f"{_EARLIER} is given another bound than {_FIRST} returns")
        self._calls.append(function.name)
        returned = self._block(function.body, frame)
        self._calls.pop()
        if not frame.returned:
            return NOTHING
        result = frame.returned[0]
        for other in frame.returned[1:]:
            result = merged({"": result}, {"": other})[""]
        if function.name == _FIRST:
            return replace(joined((result,)), first=self._rows(node, frame))
        return result if returned else joined((result,))

    def _rows(self, node: ast.Call, frame: _Frame) -> tuple[str, ...]:
        """The parameters that hold the rows' positions and sequences, of a call of the helper that asks them."""
        positions, seqs = (joined((frame.env[name],)).pointers for name in ("positions_ptr", "seqs_ptr"))
        if len(positions) != 1 or len(seqs) != 1 or not seqs <= joined((frame.env["seq"],)).data:
            self._fail(node, f"cannot tell which rows {_FIRST} is given, or that the sequence is one of theirs")
        return (*positions, *seqs)

    def _arrive(self, node: ast.Call, function: ast.FunctionDef, counter: frozenset[str], frame: _Frame) -> Fact:
        """A call of the helper that counts at ``counter``."""
        if len(counter) != 1:
            self._fail(node, f"cannot tell which counter {_ARRIVE} is given")
        self._calls.append(_ARRIVE)
        self._block(function.body, frame)
        self._calls.pop()
        return Fact(data=counter, last=(*self._last, *counter))

    def _assembly(self, node: ast.Call, args: Fact) -> Fact:
        """Inline assembly: arithmetic, or a prefetch."""
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else "[]"
        addressed = [instruction for instruction in str(text).split(";") if "[" in instruction]
        if not all("prefetch.global" in instruction for instruction in addressed):
            self._fail(node, "inline assembly that may touch memory otherwise than by a prefetch")
        if addressed:
            self._access(node, "hint", args, NOTHING)
        return Fact(data=args.data)

    # Effects.

    def _access(
        self, node: ast.expr, kind: EffectKind, pointer: Fact, mask: Fact, earlier: tuple[str, ...] = ()
    ) -> None:
        if not pointer.pointers:
            self._fail(node, "cannot tell which parameter this points into")
        for param in sorted(pointer.pointers):
            self._record(Effect(kind, param, self._last, tuple(sorted(self._guards | mask.data)), earlier=earlier))

    def _record(self, effect: Effect) -> None:
        if not self._silent:
            self.effects.append(effect)

    def _fail(self, node: ast.AST, why: str) -> NoReturn:
        line = getattr(node, "lineno", 0)
        raise VerificationError(f"kernel {self.entry}: line {line} of its source: {why}")
