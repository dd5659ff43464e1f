"""What every service can answer, as FastAPI documents and checks it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """The body of an answer in JSON; a field that is not declared is an error of the service's own."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """Every refusal."""

    error: str = Field(pattern="^[a-z-]+$", description="one word for programs")
    message: str = Field(description="one line for people")


class Health(Answer):
    status: Literal["ok"] = "ok"
    service: str
    version: str
