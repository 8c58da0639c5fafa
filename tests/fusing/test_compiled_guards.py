"""Any Python object that the compiled code queries may raise: the error propagates or is handled, is never dropped, and
never accompanies a result."""

import contextlib
import importlib
import sys

import pytest
import torch
from torch import nn

from modules import Gated, Halves, Intermediate, OwnBlock, PackedGated, Plain, TransposedPlain
from safety import assert_close, warmed, x_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), Gated(bias=True)

    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.norm(hidden_states))


class InTurn(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(32, 88), nn.GELU(), nn.Dropout(0.1), nn.Linear(88, 32)])

    def forward(self, x):
        for part in self.net:
            x = part(x)
        return x


KINDS = (Block, Gated, Halves, InTurn, Intermediate, OwnBlock, PackedGated, Plain, TransposedPlain)
ENTRIES = ("is_bare", "is_recorded", "directly", "fused", "block", "block_of", "in_turn", "split_mlp")
# Functions among the settings, alone or in a tuple or a dictionary.
SETTINGS = (
    *("known_by", "ops", "is_narrowed", "parts", "is_inference", "quiet", "autocast", "composed", "modes"),
    *("is_negated", "empty_like", "is_profiled"),
)
ANSWER = TypeError  # the call then falls back to the usual path
ERRORS = (ANSWER, KeyError, KeyboardInterrupt)
MODES = {
    "no_grad": torch.no_grad,
    "training": torch.no_grad,
    "grad": contextlib.nullcontext,
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "a default device": lambda: torch.device(DEVICE),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def shortcut(fused_mlp):
    module = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")
    yield module
    module.plain.configure(module._settings)


def fused_pairs(fused_mlp, device):
    for kind in KINDS:
        yield warmed(fused_mlp, kind().to(device).eval(), x_of(device))


class Raising:
    """Wraps the callables in a setting to raise after a number of calls."""

    def __init__(self, error, calls):
        self.error, self.calls = error, calls
        self.raised = False

    def inside(self, value):
        if isinstance(value, tuple):
            return tuple(map(self.inside, value))
        if type(value) is dict:
            return {key: self.inside(each) for key, each in value.items()}
        return self._around(value) if callable(value) and not isinstance(value, type) else value

    def _around(self, function):
        def call(*args):
            self.calls -= 1
            if self.calls < 0:
                self.raised = True
                sys._clear_type_cache()  # a look-up that misses this cache clears an error that is set
                raise self.error("of a test")
            return function(*args)

        return call


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("mode", MODES)
def test_settings_that_raise(fused_mlp, device, shortcut, mode, error):
    """Errors that count as answers fall back to the usual path; all others reach the caller."""
    raised = set()
    for module, fused in fused_pairs(fused_mlp, device):
        x = x_of(device).requires_grad_(mode == "grad")
        module.train(mode == "training"), fused.train(mode == "training")
        with MODES[mode]():
            torch.manual_seed(0)
            expected = module(x)
        for name in SETTINGS:
            for calls in range(3):
                raising = Raising(error, calls)
                shortcut.plain.configure(shortcut._settings | {name: raising.inside(shortcut._settings[name])})
                torch.manual_seed(0)
                with MODES[mode](), contextlib.nullcontext() if error is ANSWER else contextlib.suppress(error):
                    assert_close(fused(x), expected, tolerance=3e-2 if mode == "autocast" else 1e-4)
                    assert error is ANSWER or not raising.raised, f"{error.__name__} of {name} was dropped"
                raised |= {name} if raising.raised else set()
    assert raised >= {"quiet", "modes", "autocast"}


class Hostile:
    """Raises on every access and operation."""

    def __getattribute__(self, name):
        raise KeyError(name)

    __bool__ = __len__ = __index__ = __iter__ = __call__ = __hash__ = __eq__ = __float__ = __getattribute__


class HostileTensor(torch.Tensor):
    def __getattribute__(self, name):
        raise RuntimeError(name)


class HostileClass(type):
    def __getattribute__(cls, name):
        raise RuntimeError(name)


def of_hostile_class():
    return HostileClass("OfHostileClass", (), {})()


def hostile_tensor():
    return torch.zeros(3).as_subclass(HostileTensor)


HOSTILE = (Hostile, of_hostile_class, hostile_tensor)  # built per test, since pytest inspects module attributes


def replaced(arguments):
    """Yields the arguments with each tensor or module in turn replaced by something hostile."""
    for place, given in enumerate(arguments):
        if isinstance(given, (torch.Tensor, nn.Module)):
            for hostile in HOSTILE:
                yield (*arguments[:place], hostile(), *arguments[place + 1 :])
        elif isinstance(given, tuple):
            for inner in replaced(given):
                yield (*arguments[:place], inner, *arguments[place + 1 :])


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
def test_hostile_arguments(fused_mlp, device, shortcut, monkeypatch, name, with_grad):
    """Hostile arguments never cause a SystemError, Python's sign of a dropped error or a result with an error."""
    taken, entry = [], getattr(shortcut.plain, name)
    monkeypatch.setattr(shortcut.plain, name, lambda *given: (taken.append(given), entry(*given))[1])
    for _, fused in fused_pairs(fused_mlp, device):
        with torch.no_grad():
            fused(x_of(device))
    taken += [(fused.eval(),)] if name == "is_bare" else []
    operands = x_of(device), torch.randn(88, 32, device=device), None, 0
    taken += [(operands[:2],)] if name == "is_recorded" else [(False, operands)] if name == "directly" else []
    assert taken
    for given in taken:
        for hostile in replaced(given):
            with torch.set_grad_enabled(with_grad):
                try:
                    entry(*hostile)
                except Exception as error:
                    assert type(error) is not SystemError, error


@pytest.mark.parametrize("make", [object, str, int, *HOSTILE], ids=lambda make: make.__name__)
def test_what_is_no_input(fused_mlp, device, make):
    """An invalid input raises the same error as in the original module."""
    given = make()
    for module, fused in fused_pairs(fused_mlp, device):
        outcomes = []
        for each in (module, fused):
            with torch.no_grad(), pytest.raises(Exception) as raised:
                each(given)
            outcomes.append(raised.type)
        assert outcomes[0] is outcomes[1] or make in HOSTILE  # hostile inputs raise wherever they are used
