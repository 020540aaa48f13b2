"""The plan of a call, as text and as HTML for notebooks."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING

from kinetic._core.accelerators.prices import in_usd
from kinetic._core.exits import HostState
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic.errors import name_some

if TYPE_CHECKING:
    from kinetic._backends.base import Document

_LARGEST_SHOWN = 5
_PACKAGES_SHOWN = 12


@dataclass(frozen=True)
class PlanView:
    """The plan of a call, as `RemoteCallable.plan` returns it. Nothing was created.

    Attributes:
        plan: The job's plan, with everything that its hosts must know.
        documents: The objects that the backend would create, such as Kubernetes manifests.
        warnings: The warnings that the call would print.
        files: (path, bytes) of each file in the source tree, largest first.
        packages: Lines of the requirements.txt that pods would install.

    Example:
        ```python
        view = train.plan(1000)
        print(view)  # the backend, the price, the largest files, warnings, ...
        ```
    """

    plan: Plan
    documents: tuple[Document, ...]
    warnings: tuple[str, ...] = ()
    files: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    packages: tuple[str, ...] = field(default=(), repr=False)

    @property
    def backend(self) -> str:
        """The name of the backend that would run the job."""
        return self.plan.place.backend

    def __repr__(self) -> str:
        plan = self.plan
        lines = [f"Plan of {plan.name} on {plan.topology.name} (nothing was created)"]
        lines += [f"  {name:<10} {value}" for name, value in self._rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        plan = self.plan
        facts = (plan.topology.name, "nothing was created")
        picture = drawing.Picture(
            f"Plan of {plan.name}",
            facts,
            "",
            plan.topology.as_one_host() if plan.has_single_controller else plan.topology,
            (HostState.PLANNED,) * plan.hosts,
            tuple(self._rows()),
        )
        return drawing.html(picture)

    def _rows(self) -> list[tuple[str, str]]:
        largest = [f"{path} ({size_bytes:,})" for path, size_bytes in self.files[:_LARGEST_SHOWN]]
        more = len(self.files) - len(largest)
        kinds = Counter(str(document.get("kind", "?")) for document in self.documents)
        named = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]
        packages = [line.split(" --hash")[0] for line in self.packages if line[:1] not in "-# "]
        rows = {
            "packages": name_some(packages, _PACKAGES_SHOWN),
            "files": ", ".join([*largest, f"{more:,} more"] if more else largest),
            "creates": ", ".join(named),
        }
        return [
            *describe_plan(self.plan),
            *((name, value) for name, value in rows.items() if value),
            *(("warning", text) for text in self.warnings),
        ]


def describe_plan(plan: Plan) -> list[tuple[str, str]]:
    """Return a plan as rows of names and values for people. Environment variables appear without
    their values, which may be secret."""
    place, tree, options = plan.place, plan.tree, plan.options
    stands_in = f" (stands in for {place.stands_in_for})" if place.stands_in_for else ""
    source = "none"
    if tree is not None:
        files = "1 file" if tree.files == 1 else f"{tree.files:,} files"
        source = (
            f"{files}, {tree.size_bytes:,} bytes of {plan.client_root}, sha256 "
            f"{tree.manifest.digest[:12]}"
        )
    rows = {
        "backend": place.backend + stands_in,
        "cluster": ", namespace ".join(filter(None, (place.cluster, place.namespace))),
        "gang": _describe_gang(plan),
        "price": _describe_price(plan),
        "payload": f"{plan.payload.size_bytes:,} bytes, sha256 {plan.payload.digest[:12]}",
        "source": source,
        "editable": ", ".join(rel or "." for rel in plan.editable_rel),
        "installs": "" if plan.requirements is None else f"kinetic {plan.versions.kinetic}",
        "data": ", ".join(
            data.source + (f" at {data.mount}" if data.mount else "") for data in plan.data
        ),
        "env": ", ".join([*options.env, *plan.captured]),
        "secrets": ", ".join(plan.secrets),
        "jax": ", ".join(f"{name}={value}" for name, value in plan.jax_options.items()),
    }
    return [(name, value) for name, value in rows.items() if value]


def _describe_gang(plan: Plan) -> str:
    slices, elastic = plan.options.most_slices, plan.options.elastic
    unit = "single controller x devices" if plan.has_single_controller else "hosts x devices"
    shape = f"{plan.topology.kind} {plan.topology.shape_text}"
    if slices > 1:
        least = f"{elastic.least} to " if elastic and elastic.least < slices else ""
        shape = f"{least}{slices} slices of {shape}"
    return f"{plan.hosts} x {plan.devices_per_host} ({unit}; {shape})"


def _describe_price(plan: Plan) -> str:
    cost, budget = plan.cost, plan.limits.budget
    if cost is None:
        return ""
    rate = f"{in_usd(cost.usd_per_hour)} an hour ({cost.origin})"
    if cost.is_simulated:
        return f"nothing here; about {rate} for real slices"
    limit = f"; stops after its {budget.partition(' (')[0]}" if budget else ""
    return f"about {rate}{limit}"
