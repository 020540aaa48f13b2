"""Prices of slices, and the end of a job whose budget is used up."""

from __future__ import annotations

import math

import pytest

import kinetic
from kinetic import errors
from kinetic._config import settings
from kinetic._core import checks
from kinetic._core.accelerators import prices
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.accelerators.families import FAMILIES
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.formation import make_gang_spec, make_policy
from kinetic._core.gang.machine import Gang, GangPhase
from kinetic._core.gang.messages import Activity, GangSpec, Heartbeat
from kinetic._core.gang.picture import picture_of
from kinetic._core.plan import Cost

# -- prices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "usd", "region"),
    [
        ("tpu-v6e-16", 43.2, "us-central1"),
        ("v4-8", 25.76, "us-central2"),
        ("v5p-8", 33.6, "us-central1"),
        ("gpu-a100x16", 55.73951, "us-central1"),  # a separate machine type
        ("gpu-a100-80gb", 5.52382, "us-east5"),
        ("gpu-h100x8", 87.83247, "us-east4"),
        ("gpu-h200x8", 83.492, "us-central1"),
        ("tpu-v6e-16:spot", None, ""),
        ("gpu-t4", None, ""),
        ("gpu-b200x8", None, ""),
        ("tpu7x-4", None, ""),
        ("cpu", None, ""),
    ],
)
def test_a_slice_has_the_list_price_of_a_region(name, usd, region):
    price = prices.price_of(resolve(name))
    if usd is None:
        assert price is None
    else:
        source = prices.BILLING if "h200" in name else prices.LIST
        assert price == (pytest.approx(usd), f"list price, {region}", source, region)


def test_ones_own_price_comes_first_and_is_for_one_chip():
    own = {"v6e": 2.0, "v6e:spot": 0.5, "l4": 0.4, "cpu": 1.0}
    wanted = {"v6e-16": 32, "v6e-16:spot": 8, "l4x4": 1.6, "cpu:3": 3}
    by_name = {name: prices.price_of(resolve(name), own) for name in wanted}
    assert {name: price.usd_per_hour for name, price in by_name.items()} == pytest.approx(wanted)
    assert {price.origin for price in by_name.values()} == {"your price"}
    assert prices.price_of(resolve("v5p-8"), own).origin.startswith("list price")


def test_a_larger_slice_costs_more():
    by_family = {}
    for row in catalog_rows():
        if price := prices.price_of(row):
            by_family.setdefault(row.family, []).append((row.chips, price.usd_per_hour))
    assert {"v3", "v4", "v5litepod", "v5p", "v6e", "l4", "a100", "h100"} <= set(by_family)
    assert all(rates == sorted(rates) for rates in by_family.values())


@pytest.mark.parametrize(
    ("text", "by_family"),
    [
        ("v6e=2.10, v6e:spot=0.80,l4=$0.5", {"v6e": 2.1, "v6e:spot": 0.8, "l4": 0.5}),
        ("tpu-v5e=1,trillium:SPOT=0", {"v5litepod": 1.0, "v6e:spot": 0.0}),
        ("gpu-h100=2,", {"h100": 2.0}),
        ({"v6e": 2}, {"v6e": 2.0}),
    ],
)
def test_prices_are_set_by_family(text, by_family):
    assert settings.load({}, {"prices": text}).prices == by_family


@pytest.mark.parametrize("text", ["v6=1", "v6e", "v6e=dear", "v6e=-1", "v6e=nan", "=2", "2"])
def test_prices_that_are_none(text):
    with pytest.raises(errors.UsageError, match="KINETIC_PRICES"):
        settings.load({"KINETIC_PRICES": text, "HOME": "/"})


def test_a_family_without_a_price_is_told_the_form():
    with pytest.raises(errors.UsageError, match=r"got 'v6e'\. Write .*, for example \"v6e=2\.10"):
        settings.load({"KINETIC_PRICES": "v6e", "HOME": "/"})


def test_every_family_can_be_given_a_price():
    for family in FAMILIES:
        for name in (family.name, *family.aliases):
            assert prices.check_family(f"{name}:spot") == f"{family.name}:spot"


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0.00"), (43.2, "$43.20"), (12345.678, "$12,345.68"), (0.0042, "$0.0042")],
)
def test_amounts_are_written_as_people_do(amount, text):
    assert prices.in_usd(amount) == text
    assert prices.in_usd(1e-9) == "less than $0.0001"


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "usd"), [(50, 50), ("$12.5", 12.5), (" 3 ", 3), ("1e3", 1000), (None, None)]
)
def test_a_budget_is_an_amount(value, usd):
    assert checks.budget("budget", value) == usd


@pytest.mark.parametrize("value", [0, -1, "", "50 EUR", math.nan, math.inf, "$-1", "$", 10**400])
def test_a_budget_that_is_none(value):
    with pytest.raises(errors.UsageError, match="budget"):
        checks.budget("budget", value)


@pytest.mark.parametrize("value", [True, [1], b"1"])
def test_a_budget_of_another_type(value):
    with pytest.raises(errors.UsageTypeError, match=r"must be a number or text; .* Write 50"):
        checks.budget("budget", value)


def plan_of(monkeypatch, accelerator, own="", **options):
    monkeypatch.setenv("KINETIC_PRICES", own)

    @kinetic.run(accelerator, **options)
    def train():
        pass

    return train.plan()


@pytest.mark.starts_processes
def test_a_simulated_slice_costs_nothing_and_the_plan_says_what_the_real_one_would(
    home, monkeypatch
):
    view = plan_of(monkeypatch, "tpu-v6e-16", slices=2, budget=10)
    assert view.plan.cost == Cost(86.4, "list price, us-central1", is_simulated=True)
    assert view.plan.limits.budget_s is None
    assert "nothing here; about $86.40 an hour (list price, us-central1)" in repr(view)
    assert view.plan.cost.for_seconds(3600) == 0


@pytest.mark.starts_processes
def test_processors_of_this_machine_cost_what_the_user_says(home, monkeypatch):
    view = plan_of(monkeypatch, "cpu:2", "cpu=1.5", budget="$6")
    assert view.plan.limits.budget_s == 7200
    assert "about $3.00 an hour (your price); stops after its budget of $6.00" in repr(view)
    assert plan_of(monkeypatch, "cpu:2", budget=6).plan.cost is None  # The price is unknown.
    assert plan_of(monkeypatch, "cpu", "cpu=0", budget=6).plan.limits.budget_s is None  # no cost


@pytest.mark.starts_processes
def test_a_budget_where_nobody_knows_the_price(home, monkeypatch):
    monkeypatch.setenv("KINETIC_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("KINETIC_STORE", str(home))
    with pytest.raises(errors.UsageError, match="Set KINETIC_PRICES=b200=DOLLARS"):
        plan_of(monkeypatch, "gpu-b200x8", backend="ray", budget=6)
    view = plan_of(monkeypatch, "gpu-a100", backend="ray", budget=6)
    assert view.plan.cost == Cost(3.67339, "list price, us-central1")
    assert view.plan.limits.budget_s == pytest.approx(6 / 3.67339 * 3600)


# -- the gang --------------------------------------------------------------------------------------


def run_gang(hosts=2, **limits):
    gang = Gang(GangSpec(hosts, heartbeat_timeout_s=1e6, **limits), 0.0)
    for host in range(hosts):
        gang.join(host, "a", "h", 0.0)
        gang.heartbeat(Heartbeat(host, Activity.RUNNING), 0.0)
    return gang


def test_a_gang_stops_when_its_budget_is_used_up_and_functions_may_save():
    gang = run_gang(budget_s=100.0, budget="budget of $5", grace_s=30.0)
    gang.sweep(99.0)
    assert gang.phase is GangPhase.RUNNING
    assert not gang.view(0).preempted
    gang.sweep(100.0)
    view = gang.view(1)
    assert (view.stop, view.stop_exit, view.preempted) == (True, Exit.OVER_BUDGET, True)
    assert (view.grace_s, view.stop_reason) == (30.0, "the job has used up its budget of $5")


def test_whichever_limit_is_reached_first():
    both = {"budget_s": 5.0, "timeout_s": 5.0}
    for change, expected in (({}, Exit.TIMEOUT), ({"timeout_s": 6.0}, Exit.OVER_BUDGET)):
        gang = run_gang(**both | change)
        gang.sweep(5.5)
        assert gang.view(0).stop_exit is expected


@pytest.mark.starts_processes
def test_attempts_share_the_budget_and_fewer_slices_use_less_of_it(home, monkeypatch):
    own = {"cpu": 3600.0}  # $1 for each second of a slice
    text = ",".join(f"{name}={usd}" for name, usd in own.items())
    plan = plan_of(monkeypatch, "cpu", text, slices=(1, 2), budget=60).plan
    policy = make_policy(plan)
    assert make_gang_spec(plan, policy, 1.0).budget_s == 30
    policy.count_time(10.0)  # two slices: $20
    policy.slices = (1,)
    assert make_gang_spec(plan, policy, 1.0).budget_s == 40
    policy.count_time(38.0)  # one slice: $38
    policy.slices = (0, 1)
    assert make_gang_spec(plan, policy, 1.0).budget_s == pytest.approx(1.0)
    policy.count_time(7.0)
    assert 0 < make_gang_spec(plan, policy, 1.0).budget_s < 0.1

    fixed = plan_of(monkeypatch, "cpu", text, slices=2, retries=3, budget=60).plan
    policy = make_policy(fixed)
    policy.count_time(12.0)
    assert make_gang_spec(fixed, policy, 1.0).budget_s == 18


# -- the cost of attempts, from events -------------------------------------------------------------


def test_what_attempts_have_cost():
    def event(kind, attempt, time, **more):
        return GangEvent(kind, None, "", attempt=attempt, time=time, **more)

    elastic = [
        event(EventKind.FORMED, 1, 0.0, slices=(0, 1), hosts=(0, 1)),
        event(EventKind.READY, 1, 100.0),
        event(EventKind.ENDED, 1, 110.0),
        event(EventKind.FORMED, 2, 115.0, slices=(1,), hosts=(0,)),
        event(EventKind.READY, 2, 120.0),
        event(EventKind.FORMED, 3, 140.0, slices=(0, 1), hosts=(0, 1)),  # The leader was killed.
        event(EventKind.READY, 3, 150.0),
    ]
    assert picture_of(elastic, 2).paid_s(2, 160.0) == 10 + 20 / 2 + 10
    assert picture_of([], 2).paid_s(2, 160.0) == 0
    assert picture_of([event(EventKind.READY, 1, 5.0)], 2).paid_s(1, 4.0) == 0  # Clocks differ.
