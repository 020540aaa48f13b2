"""What a call would submit, to look at before submitting it.

In: a plan, the documents of a backend. Out: text, HTML.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING

from kinetic._core.accelerators.prices import in_usd
from kinetic._core.exits import HostState
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass

if TYPE_CHECKING:
    from kinetic._backends.base import Document

_LARGEST_SHOWN = 5


@dataclass(frozen=True)
class PlanView:
    """What a call would submit.

    Attributes:
        plan: everything that a host must know.
        documents: what the backend would create.
        warnings: for the caller, before it leaves the machine.
        files: all files of the source tree, (path, bytes), largest first.
    """

    plan: Plan
    documents: tuple[Document, ...]
    warnings: tuple[str, ...] = ()
    files: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    @property
    def backend(self) -> str:
        """The backend that would take the job."""
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
        plan = self.plan
        place = plan.place
        stands_in = f" (stands in for {place.stands_in_for})" if place.stands_in_for else ""
        rows = {
            "backend": place.backend + stands_in,
            "cluster": ", namespace ".join(filter(None, (place.cluster, place.namespace))),
            "gang": f"{plan.hosts} x {plan.devices_per_host} ({self._unit()}; {self._shape()})",
            "price": self._price(),
            "payload": f"{plan.payload.size_bytes:,} bytes, sha256 {plan.payload.digest[:12]}",
            "source": self._source(),
            "editable": ", ".join(rel or "." for rel in plan.editable_rel),
            "files": self._largest(),
            "installs": self._installs(),
            "data": ", ".join(
                each.source + (f" at {each.mount}" if each.mount else "") for each in plan.data
            ),
            "env": ", ".join([*plan.options.env, *plan.captured]),
            "secrets": ", ".join(plan.secrets),
            "jax": ", ".join(f"{name}={value}" for name, value in plan.jax_options.items()),
            "creates": ", ".join(self._kinds()),
        }
        return [(name, value) for name, value in rows.items() if value] + [
            ("warning", text) for text in self.warnings
        ]

    def _price(self) -> str:
        cost, budget = self.plan.cost, self.plan.limits.budget
        if cost is None:
            return ""
        rate = f"{in_usd(cost.usd_per_hour)} an hour ({cost.origin})"
        if cost.is_simulated:
            return f"nothing here; about {rate} for real slices"
        limit = f"; stops after its {budget.partition(' (')[0]}" if budget else ""
        return f"about {rate}{limit}"

    def _kinds(self) -> list[str]:
        kinds = Counter(str(document.get("kind", "?")) for document in self.documents)
        return [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]

    def _largest(self) -> str:
        shown = [f"{path} ({size_bytes:,})" for path, size_bytes in self.files[:_LARGEST_SHOWN]]
        more = (
            [f"{len(self.files) - _LARGEST_SHOWN:,} more"]
            if len(self.files) > _LARGEST_SHOWN
            else []
        )
        return ", ".join(shown + more)

    def _installs(self) -> str:
        listed = self.plan.requirements
        version = self.plan.versions.kinetic
        return "" if listed is None else f"kinetic {version}, list sha256 {listed.digest[:12]}"

    def _unit(self) -> str:
        single = self.plan.has_single_controller
        return "single controller x devices" if single else "hosts x devices"

    def _shape(self) -> str:
        slices, elastic = self.plan.options.most_slices, self.plan.options.elastic
        one = f"{self.plan.topology.kind} {self.plan.topology.shape_text}"
        least = f"{elastic.least} to " if elastic and elastic.least < slices else ""
        return one if slices == 1 else f"{least}{slices} slices of {one}"

    def _source(self) -> str:
        tree = self.plan.tree
        if tree is None:
            return "none"
        return (
            f"{tree.files:,} files, {tree.size_bytes:,} bytes of {self.plan.client_root}, sha256 "
            f"{tree.manifest.digest[:12]}"
        )
