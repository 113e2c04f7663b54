"""Context: a document that was read, to be asked about any number of times, also from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig.attention.cpu_dense import CpuDense
from magicpig.attention.plan import Plan
from magicpig.document import Document
from magicpig.kv import store
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV
from magicpig.kv.store import StoreError

if TYPE_CHECKING:
    from magicpig.engine.sequence import Event
    from magicpig.llm import LLM

__all__ = ["Context", "StoreError"]


@dataclass(frozen=True)
class Context:
    """A document, its tokens, and their keys and values in every layer."""

    document: Document
    token_ids: list[int]
    kv: SequenceKV

    @classmethod
    def read(
        cls, llm: LLM, document: Document, on_event: Callable[[Event], None] | None = None
    ) -> Context:
        """Reads the document with the model."""
        token_ids, _ = document.parts(llm.tokenizer, "")
        return cls(document, token_ids, llm.read(token_ids, on_event))

    def prompt_ids(self, llm: LLM, question: str) -> list[int]:
        """Tokens of the document and a question."""
        return self.token_ids + self.document.parts(llm.tokenizer, question)[1]

    def save(self, llm: LLM, path: Path | str) -> None:
        """Writes the context to a file. All or nothing."""
        about = {
            "settings": llm.settings,
            "identity": llm.identity,
            "document": asdict(self.document),
            "token_ids": self.token_ids,
        }
        try:
            kv = Plan(CpuDense()).adopt(self.kv) if self._is_elsewhere else self.kv
        except ValueError as error:
            raise StoreError(f"{str(path)!r} cannot be written: {error}") from error
        store.save(Path(path), kv, about)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the rows are not all where the store finds them."""
        return any(not isinstance(layer, NativeLayer) for layer in self.kv.attention_layers)

    @classmethod
    def load(cls, llm: LLM, path: Path | str) -> Context:
        """A context from a file, for the model and method in use.

        StoreError unless the file is whole and belongs to the model. Where it was made for another
        method, indexes are built anew.
        """
        path = Path(path)
        about = store.load_about(path)
        try:
            document, token_ids = Document(**about["document"]), about["token_ids"]
            _check_model(llm, path, about)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{str(path)!r} holds no document: {error}") from error
        if document.parts(llm.tokenizer, "")[0] != token_ids:
            raise StoreError(f"{str(path)!r} was made with another tokenizer or chat template")
        kv, _ = store.load(path)
        runner = llm.engine.runner
        return cls(document, token_ids, runner.plan.adopt(kv, runner.device))


def _check_model(llm: LLM, path: Path, about: dict[str, Any]) -> None:
    if about["identity"] != llm.identity:
        made_with = about["settings"]["model"]
        dtypes = about["settings"]["dtype"], llm.settings["dtype"]
        if dtypes[0] != dtypes[1]:
            made_with, used = f"{made_with} in {dtypes[0]}", f"{llm.name} in {dtypes[1]}"
        else:
            used = f"{llm.name} in use, or not with these weights"
        raise StoreError(
            f"{str(path)!r} was made with the model {made_with}, which is not the {used}"
        )
