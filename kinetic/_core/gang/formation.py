"""Policy, gang and assignments of a job's attempts, derived from its plan."""

from __future__ import annotations

from dataclasses import replace

from kinetic._core.gang.messages import GangSpec, HostAssignment
from kinetic._core.gang.policy import AttemptPolicy, Failure
from kinetic._core.plan import Plan

PEERS_S = 0.3
"""Seconds to wait for other hosts to fail as one host just did, so that all are named."""
_SHORTEST_S = 0.001


def make_policy(
    plan: Plan,
    *,
    attempt: int = 1,
    failures: tuple[Failure, ...] = (),
    retries: int | None = None,
    taken_away: int = 0,
) -> AttemptPolicy:
    """Return the policy for the attempts of a job from this one on. `retries` is the number of
    remaining retries; None for the plan's number. For the others, see `AttemptPolicy`."""
    retries = plan.options.retries if retries is None else retries
    if (elastic := plan.elastic_gang) is not None:
        away_s = plan.limits.slice_away_s
        return AttemptPolicy(elastic, away_s, attempt, failures, retries=retries)
    return AttemptPolicy.make_fixed(
        1 if plan.has_single_controller else plan.options.most_slices,
        start_timeout_s=plan.limits.start_timeout_s,
        attempt=attempt,
        retries=retries,
        taken_away=taken_away,
    )


def first_assignment(plan: Plan, policy: AttemptPolicy) -> HostAssignment:
    """Return the assignment of host 0 in the first attempt of a policy."""
    slices = policy.slices if plan.elastic_gang else tuple(range(plan.options.most_slices))
    return HostAssignment(
        policy.attempt,
        hosts=plan.hosts,
        slices=slices,
        retries_left=policy.retries_left,
    )


def make_gang_spec(plan: Plan, policy: AttemptPolicy, heartbeat_timeout_s: float) -> GangSpec:
    """Return the specification of the current attempt's gang. All attempts of a job share the
    budget, and all attempts of an elastic job also share the timeout."""
    limits = plan.limits
    spec = GangSpec(
        hosts=plan.hosts,
        start_timeout_s=limits.start_timeout_s,
        timeout_s=limits.timeout_s,
        timeout="" if limits.timeout_s is None else f"timeout of {limits.timeout_s:g} s",
        budget_s=_subtract(limits.budget_s, policy.paid_s),
        budget=limits.budget,
        hang_timeout_s=limits.hang_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        grace_s=limits.grace_s,
        peers_window_s=PEERS_S,
        still_notice_s=limits.still_notice_s,
        attempt=policy.attempt,
        repeats=policy.retries_left > 0,
        is_strict=plan.options.compare_programs == "strict",
    )
    if policy.is_fixed:
        return spec
    together = ", all attempts together" if policy.attempt > 1 else ""
    budget_s, share = spec.budget_s, len(policy.slices) / policy.rules.most
    return replace(
        spec,
        hosts=len(policy.slices) * plan.topology.hosts,
        slices=policy.slices,
        timeout_s=_subtract(limits.timeout_s, policy.ran_s),
        timeout=f"{spec.timeout}{together}",
        budget_s=None if budget_s is None else budget_s / share,
    )


def _subtract(limit_s: float | None, used_s: float) -> float | None:
    return None if limit_s is None else max(limit_s - used_s, _SHORTEST_S)
