"""Models on the Hugging Face hub: which are at hand, and why one cannot be had."""

from __future__ import annotations

from pathlib import Path

from magicpig.models.catalog import BUILTIN, ModelError

TIMEOUT_SECONDS = 10


def cached_folder(name: str) -> Path | None:
    """Where the hub's own cache has this model, perhaps not all of it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def check_reachable(name: str) -> None:
    """Raises unless the hub answers and has this model, and says which of the two it was.

    One question with one answer: downloads that cannot work retry for half a minute.
    """
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        model_info(name, timeout=TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise ModelError(
            f"the hub's {name!r} is for those its owners admit: ask for access on its page, then "
            "run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{_unknown(name)}, and the hub has no model of that name that you may see. "
            "Check the spelling; a private model takes `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{_unknown(name)}, and the hub has no such names") from error
    except Exception as error:  # what the network raises depends on the hub library's version
        raise ModelError(
            f"{_unknown(name)}, and the hub could not be reached to look for it there: {error}"
        ) from error


def _unknown(name: str) -> str:
    return f"{name!r} is not built in ({', '.join(sorted(BUILTIN))}), no folder has that name"
