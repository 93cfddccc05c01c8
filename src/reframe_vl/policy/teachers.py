"""Teachers: frozen models that say how likely they would have written what the student wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftConfig, PeftModel

from reframe_vl.policy.loading import Policy, load_policy
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import score
from reframe_vl.policy.teacher_folders import Hosting, checked_folder
from reframe_vl.types import Context, Sampling


class Teacher(ABC):
    """Scores contexts that a student produced."""

    @abstractmethod
    def log_probs(
        self, contexts: Sequence[Context], sampling: Sampling
    ) -> list[npt.NDArray[np.float32]]:
        """The teacher's log-probabilities of each context's trained tokens.

        Args:
            contexts: As the student saw them.
            sampling: The distribution that the student drew from; the teacher's is shaped alike.
        """


class LocalTeacher(Teacher):
    """A teacher in this process, whose whole distribution is at hand."""

    student: VisionLanguageModel
    max_tokens: int = 16384

    @abstractmethod
    @contextmanager
    def model(self) -> Iterator[VisionLanguageModel]:
        """The teacher's model, for as long as the context lasts, without gradients."""

    def log_probs(
        self, contexts: Sequence[Context], sampling: Sampling
    ) -> list[npt.NDArray[np.float32]]:
        """Scores contexts through ``policy.score``."""
        with self.model() as model:
            shaped = _shaped(sampling, self.student.vocab_size, model.vocab_size)
            scores = score(model, contexts, shaped, max_tokens=self.max_tokens)
            return [piece.cpu().numpy() for piece in scores.per_context()]


@dataclass
class FrozenModel(LocalTeacher):
    """A model of its own.

    Attributes:
        teacher: The frozen model.
        student: On whose device it is scored.
        offload: Keep it in the CPU's memory while it is not needed.
    """

    teacher: VisionLanguageModel
    student: VisionLanguageModel
    offload: bool = False
    max_tokens: int = 16384

    @contextmanager
    def model(self) -> Iterator[VisionLanguageModel]:
        """The model, on the student's device."""
        self.teacher.to(self.student.device)
        try:
            with self._precision(), self.teacher.inference():
                yield self.teacher
        finally:
            if self.offload:
                self.teacher.to("cpu")

    def _precision(self) -> AbstractContextManager[object]:
        """A teacher in single precision stays so beside a student in mixed precision."""
        if self.teacher.dtype == torch.float32:
            return torch.autocast(self.student.device.type, enabled=False)
        return nullcontext()


@dataclass
class Adapter(LocalTeacher):
    """A LoRA adapter on a base that it shares with other teachers, and with the student if it can.

    Attributes:
        host: The model that carries the adapters.
        name: Of the adapter.
        student: On whose device it is scored.
    """

    host: VisionLanguageModel
    name: str
    student: VisionLanguageModel
    max_tokens: int = 16384

    @property
    def adapts_head(self) -> bool:
        """Whether the adapter changes the language model's head."""
        names = (name for name, _ in self.host.base.lm_head.named_parameters())  # type: ignore[union-attr]
        return any(self.name in name.split(".") for name in names)

    @contextmanager
    def model(self) -> Iterator[VisionLanguageModel]:
        """The host with this adapter at work; afterwards it is as it was."""
        if self.host is not self.student:
            self.host.to(self.student.device)
        # The student is in its place. FSDP2 would take apart what was gathered, were it moved.
        peft: Any = self.host.model
        before = peft.active_adapter
        trained = [name for name, p in peft.named_parameters() if p.requires_grad]
        peft.set_adapter(self.name, inference_mode=True)
        try:
            with self.host.inference():
                yield self.host
        finally:
            peft.set_adapter(before, inference_mode=True)
            parameters = dict(peft.named_parameters())
            for name in trained:
                parameters[name].requires_grad_(True)


@dataclass
class Teachers:
    """Teachers by name, and which of them a domain is taught by.

    Attributes:
        paths: Of each teacher: a run directory or a checkpoint folder.
        routes: From a sample's domain to a teacher's name.
        hosting: ``models`` loads each whole; ``adapters`` loads adapters onto one frozen base.
        offload: Keep whole models in the CPU's memory while they are not needed.
        dtype: Of the weights of whole teachers, which they compute in; None is the student's.
    """

    paths: Mapping[str, Any]
    routes: Mapping[str, str]
    hosting: Hosting = "models"
    offload: bool = False
    dtype: str | None = None
    _teachers: dict[str, Teacher] = field(default_factory=dict)
    _folders: dict[str, Path] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.hosting not in ("models", "adapters"):
            raise ValueError(f"Unknown hosting {self.hosting!r}: use models or adapters.")
        for name, path in self.paths.items():
            # A number would be read as one from a command.
            if path is not None and not isinstance(path, str):
                raise ValueError(
                    f"teachers.{name} is {path!r}: give the path of a run directory or a "
                    f"checkpoint folder, as in teachers.{name}=./{path}."
                )

    @property
    def routed(self) -> list[str]:
        """The teachers that a domain is taught by and that have a path."""
        return sorted(name for name in set(self.routes.values()) if self.paths.get(name))

    def add(self, name: str, teacher: Teacher) -> None:
        """Puts a teacher that is loaded already in the place of its path."""
        self._teachers[name] = teacher

    def check(self, student: Policy, domains: Collection[str] = ()) -> None:
        """Looks at the teachers without loading them.

        Args:
            student: Whom they teach.
            domains: Each must have a teacher.

        Raises:
            FileNotFoundError: There is no checkpoint at a path.
            KeyError: A domain has no teacher.
            ValueError: A teacher's tokens are not the student's, its adapter is of another base,
                or the settings of adapters do not fit.
        """
        for domain in sorted(domains):
            self._name_of(domain)
        if self.hosting == "adapters":
            self._check_adapters()
        for name in self.routed:
            if name not in self._teachers and name not in self._folders:
                path = str(self.paths[name])
                self._folders[name] = checked_folder(student, path, self.hosting, name)

    def _check_adapters(self) -> None:
        if self.dtype is not None:
            raise ValueError(
                f"algorithm.teachers.dtype={self.dtype} is of whole models: adapters have the "
                "dtype of the base that carries them. Take hosting=models, or leave it null."
            )
        names: dict[str, str] = {}
        for name in self.routed:
            if (other := names.setdefault(_adapter_name(name), name)) != name:
                raise ValueError(
                    f"The teachers {other} and {name} would be one adapter, since PEFT's names "
                    "have no dots: call one of them otherwise."
                )

    def load(self, student: Policy, max_tokens: int = 16384) -> None:
        """Loads the teachers that are routed to, and checks that they read as the student does.

        Args:
            student: Whom they teach.
            max_tokens: A forward of theirs takes at most so many tokens.

        Raises:
            FileNotFoundError: There is no checkpoint at a path.
            ValueError: A teacher's tokens or images are not the student's.
        """
        self.check(student)
        host: VisionLanguageModel | None = None
        for name in self.routed:
            if name in self._teachers:
                continue
            folder = self._folders[name]
            if self.hosting == "adapters":
                host = _with_adapter(student, host, folder, name)
                self._teachers[name] = Adapter(host, _adapter_name(name), student.model, max_tokens)
                continue
            dtype = self.dtype or str(student.model.dtype).removeprefix("torch.")
            loaded = load_policy(folder, dtype=dtype)
            if loaded.model.view_maker != student.model.view_maker:
                raise ValueError(
                    f"Teacher {name} resizes or normalises images in another way than the student: "
                    "take a teacher of the student's family, with its processor settings."
                )
            model = loaded.model.requires_grad_(False)
            model.visual_cache = student.model.visual_cache
            self._teachers[name] = FrozenModel(model, student.model, self.offload, max_tokens)

    @property
    def heads_stay(self) -> bool:
        """Whether each teacher's head is at hand, as it is, when the teacher is not at work."""
        offloaded = self.offload and self.hosting == "models"
        return not offloaded and not any(
            isinstance(teacher, Adapter) and teacher.adapts_head
            for teacher in self._teachers.values()
        )

    def hosted_by(self, model: VisionLanguageModel) -> bool:
        """Whether a teacher is an adapter on this model."""
        return any(isinstance(t, Adapter) and t.host is model for t in self._teachers.values())

    def of(self, domain: str) -> Teacher:
        """The one teacher of a domain.

        Raises:
            KeyError: The domain has none.
        """
        return self._teachers[self._name_of(domain)]

    def _name_of(self, domain: str) -> str:
        if domain not in self.routes:
            known = ", ".join(sorted(self.routes)) or "none"
            raise KeyError(
                f"Domain {domain!r} has no teacher (there are routes for: {known}): add it to "
                "algorithm.teachers.routes, or leave its samples out of the data."
            )
        name = self.routes[domain]
        if name not in self._teachers and not self.paths.get(name):
            raise KeyError(
                f"Domain {domain} is taught by {name}, which has no checkpoint: set "
                f"teachers.{name}=PATH (a run directory or a checkpoint folder), or leave the "
                "domain's samples out of the data."
            )
        return name


def _with_adapter(
    student: Policy, host: VisionLanguageModel | None, folder: Path, name: str
) -> VisionLanguageModel:
    """Loads an adapter onto the student's own base where that is frozen, else onto one copy.

    Raises:
        ValueError: The adapter's weights are not all that it should have, and no others.
    """
    own = _adapter_name(name)
    if host is None and isinstance(student.model.model, PeftModel):
        host = student.model
    if host is None:
        dtype = str(student.model.dtype).removeprefix("torch.")
        host = load_policy(student.path, dtype=dtype).model.requires_grad_(False)
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        host.model = PeftModel(host.model, config, own)
        host.visual_cache = student.model.visual_cache
    peft: Any = host.model
    report = peft.load_adapter(str(folder), adapter_name=own, is_trainable=False)
    # What has no place is left out, and what is missing adds nothing, both without a word.
    for what, keys in (("lacks", report.missing_keys), ("has", report.unexpected_keys)):
        if keys:
            rest = "the base has no place for" if what == "has" else "its settings promise"
            raise ValueError(
                f"The adapter of teacher {name} in {folder} {what} weights that {rest}, "
                f"{len(keys)} in all (first: {keys[0]}): it was trained on another model than "
                f"{student.path}, or written by another version. Save it again, or merge it into "
                "its base and take hosting=models."
            )
    return host


def _adapter_name(teacher: str) -> str:
    """Never that of the student's own adapter, and without dots, which PEFT does not take."""
    return f"teacher_{teacher.replace('.', '_')}"


def _shaped(sampling: Sampling, mine: int, size: int) -> Sampling:
    """The student's distribution for a vocabulary padded to another size.

    Ids beyond the student's own are never drawn: it has no row for them.
    """
    banned = tuple(i for i in sampling.banned_ids if i < size)
    return replace(sampling, banned_ids=(*banned, *range(mine, size)))
