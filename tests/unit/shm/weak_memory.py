"""Every order in which a few threads can execute on a processor with weak memory: a model checker.

A thread is a list of steps. A step may be executed before earlier ones of its thread unless it has
to stay behind one of them (`stays_behind`): that is what a processor of the ARMv8 kind allows,
whose stores all others see at once. `final_states` executes them in every possible order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

RELAXED, ACQUIRE, RELEASE, SEQ_CST = "relaxed", "acquire", "release", "seq_cst"
Values = Mapping[str, int]


def always(_: Values) -> bool:
    return True


@dataclass(frozen=True)
class Step:
    """One access to shared memory, or a system call.

    kind: load, store, rmw (both at once), sleep or wake (at a location); `wait` is a load that the
    thread repeats until the value is at least `value`. order: the weakest that it has. into: the
    register that gets what was loaded. value: what is stored or waited for, or a sleeper's ticket,
    perhaps a function of the registers named in `needs`. change: an rmw's new value by the old one.
    when: the step is taken, by the same registers; not of loads. source: ``file.h: text`` of it."""

    kind: str
    at: str
    order: str = RELAXED
    into: str = ""
    value: int | Callable[[Values], int] = 0
    change: Callable[[int], int] = int
    when: Callable[[Values], bool] = always
    needs: tuple[str, ...] = ()
    source: str = ""

    @property
    def loads(self) -> bool:
        return self.kind in ("load", "wait", "rmw")

    @property
    def stores(self) -> bool:
        return self.kind in ("store", "rmw")

    @property
    def is_call(self) -> bool:
        return self.kind in ("sleep", "wake")


Thread = Sequence[Step]


def stays_behind(later: Step, earlier: Step) -> bool:
    """Whether no processor executes `later` before `earlier`, which comes first in the program.

    A load may come before the branch that it depends on (it is speculated), a store may not."""
    if later.at == earlier.at or later.is_call or earlier.is_call:
        return True
    if earlier.loads and earlier.order in (ACQUIRE, SEQ_CST):
        return True
    if later.stores and later.order in (RELEASE, SEQ_CST):
        return True
    if earlier.order == later.order == SEQ_CST:
        return True
    depends = earlier.kind == "wait" or earlier.into in later.needs
    return depends and later.kind not in ("load", "wait")


@dataclass(frozen=True)
class State:
    """`done` of each thread: its executed steps, a bit each; `asleep`: at which location."""

    done: tuple[int, ...]
    asleep: tuple[str, ...]
    memory: tuple[tuple[str, int], ...]
    registers: tuple[tuple[str, int], ...]


def _enabled(threads: Sequence[Thread], state: State) -> Iterator[tuple[int, int]]:
    for number, thread in enumerate(threads):
        if state.asleep[number]:
            continue
        done = state.done[number]
        for at, step in enumerate(thread):
            if done >> at & 1:
                continue
            waits_for = (i for i in range(at) if not done >> i & 1)
            if not any(stays_behind(step, thread[i]) for i in waits_for):
                yield number, at


def _executed(threads: Sequence[Thread], state: State, number: int, at: int) -> State | None:
    step = threads[number][at]
    memory, registers = dict(state.memory), dict(state.registers)
    asleep = list(state.asleep)
    found = memory[step.at]
    value = step.value if isinstance(step.value, int) else step.value(registers)
    if step.when(registers):
        if step.kind == "wait" and found < value:
            return None
        if step.into:
            registers[step.into] = found
        if step.kind == "store":
            memory[step.at] = value
        elif step.kind == "rmw":
            memory[step.at] = step.change(found)
        elif step.kind == "sleep" and found == value:
            asleep[number] = step.at
        elif step.kind == "wake":
            asleep = ["" if where == step.at else where for where in asleep]
    done = list(state.done)
    done[number] |= 1 << at
    return State(
        tuple(done), tuple(asleep), tuple(sorted(memory.items())), tuple(sorted(registers.items()))
    )


def final_states(threads: Sequence[Thread], memory: Values) -> Iterator[tuple[State, bool]]:
    """Each state in which nothing more can be executed; whether all threads have ended in it."""
    registers = {step.into: -1 for thread in threads for step in thread if step.into}
    nothing = tuple(0 for _ in threads)
    values = tuple(sorted(memory.items())), tuple(sorted(registers.items()))
    first = State(nothing, ("",) * len(threads), *values)
    seen, ahead = {first}, [first]
    while ahead:
        state = ahead.pop()
        followers = [_executed(threads, state, *step) for step in _enabled(threads, state)]
        possible = [follower for follower in followers if follower is not None]
        if not possible:
            ended = all(
                done == (1 << len(thread)) - 1
                for done, thread in zip(state.done, threads, strict=True)
            )
            yield state, ended and not any(state.asleep)
        for follower in possible:
            if follower not in seen:
                seen.add(follower)
                ahead.append(follower)
