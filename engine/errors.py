"""What can go wrong in the engine, beyond a plain bad argument.

Exception
└── EngineError
    ├── UnsupportedModel       (also ValueError)   the model would give wrong results here
    ├── ModelNotFound          (also ValueError)   there is no such model
    └── DemoModelUnavailable   (also RuntimeError) the demo model cannot be fetched or converted
"""


class EngineError(Exception):
    """The base of the engine's own errors."""


class UnsupportedModel(EngineError, ValueError):
    """A model that was refused at load, since its outputs would differ from its own.

    `model_type` is the type in its configuration, `reason` one sentence on what was found.
    """

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"a model of type {model_type!r} cannot run through block tables: {reason}")
        self.model_type = model_type
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.model_type, self.reason)


class ModelNotFound(EngineError, ValueError):
    """A name behind which no model stands: neither the demo model, nor a local directory, nor a hub id."""


class DemoModelUnavailable(EngineError, RuntimeError):
    """The demo model could not be fetched, checked or converted; the message says what to do."""
