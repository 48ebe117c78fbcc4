"""The HTTP application: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from foretell._engine import Engine
from foretell._verify import RULES
from foretell._version import __version__
from foretell.server._calls import (
    Call,
    ClientGoneError,
    EventStream,
    answered,
    api_error,
    while_there,
)
from foretell.server._errors import ApiError, Json
from foretell.server._format import ChatFormat, CompletionFormat, Format
from foretell.server._guard import Guard
from foretell.server._log import Line
from foretell.server._metrics import CONTENT_TYPE, Metrics
from foretell.server._scheduler import Scheduler
from foretell.server._schema import (
    MOST_DRAFT_TOKENS,
    ChatRequest,
    CompletionRequest,
    Sampling,
    problem,
)
from foretell.server._settings import Settings
from foretell.server._translate import Order, chat_order, completion_order, drafters_of

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Server:
    """An engine behind HTTP: the scheduler, the counters and the application ``app``."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        engine.require_tokenizer("the OpenAI API")
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        self.scheduler = Scheduler(engine, settings, self.metrics)
        self.is_stopping = False
        self._began = int(time.time())
        self._fingerprint = "fp_" + self._hash()
        self.app = self._make_app()

    def refuse_new(self) -> None:
        """The server is about to stop: what runs goes on, and nothing new is taken."""
        self.is_stopping = True
        self.scheduler.refuse_new()

    def _hash(self) -> str:
        model = self.engine.model
        about = f"{__version__} {self.settings.model_name} {model.identity} {model.vocab_size}"
        return hashlib.sha256(about.encode()).hexdigest()[:12]

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.scheduler.start()
            yield
            await asyncio.to_thread(self.scheduler.stop)

        middleware = [Middleware(Guard, settings=self.settings)]
        if self.settings.cors_origins:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.settings.cors_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["Authorization", "Content-Type"],
                ),
            )
        app = FastAPI(
            title="Foretell",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            lifespan=lifespan,
            middleware=middleware,
            default_response_class=Json,
        )
        app.add_exception_handler(ApiError, _refused(self.metrics))
        app.add_exception_handler(RequestValidationError, _invalid(self.metrics))
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(Exception, _unexpected)
        self._add_routes(app)
        return app

    def _add_routes(self, app: FastAPI) -> None:
        @app.post("/v1/chat/completions")
        async def chat_completions(body: ChatRequest, request: Request) -> Response:
            return await self._complete(body, request, lambda: chat_order(body, *self._both))

        @app.post("/v1/completions")
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self._complete(body, request, lambda: completion_order(body, *self._both))

        @app.get("/v1/models")
        async def models() -> Response:
            return Json({"object": "list", "data": [self._about_model()]})

        @app.get("/v1/models/{name:path}")
        async def model(name: str) -> Response:
            self._check_model(name)
            return Json(self._about_model())

        @app.get("/health")
        @app.get("/health/ready")
        async def ready() -> Response:
            if self.is_stopping or not self.scheduler.is_alive:
                return Json({"status": "stopping" if self.is_stopping else "failed"}, 503)
            return Json({"status": "ready"})

        @app.get("/health/live")
        async def live() -> Response:
            return Json({"status": "live"})

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

        @app.get("/version")
        async def version() -> Response:
            return Json({"version": __version__})

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return Response(
                (STATIC / "index.html").read_bytes(), headers=PAGE_HEADERS, media_type="text/html"
            )

        app.mount("/static", _PageFiles(directory=STATIC), name="static")

    @property
    def _both(self) -> tuple[Engine, Settings]:
        return self.engine, self.settings

    def _check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here; this server has "
                f"{self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _about_model(self) -> dict[str, Any]:
        engine = self.engine
        own = [drafter.name for drafter in engine.drafters]
        plain = engine.pass_seconds(1, 256)
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._began,
            "owned_by": "foretell",
            "max_model_len": engine.model.max_length,
            "foretell": {
                "drafters": drafters_of(engine),
                "default_drafters": own,
                "verification": list(RULES),
                "max_num_draft_tokens": MOST_DRAFT_TOKENS,
                "plain_seconds_per_token": plain,
            },
        }

    async def _complete(
        self, body: Sampling, request: Request, translate: Callable[[], Order]
    ) -> Response:
        line = Line(
            request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex,
            request.url.path,
            with_text=self.settings.log_prompts,
        )
        line.text(
            prompt=body.model_dump(exclude_none=True).get("messages")
            or getattr(body, "prompt", None)
        )
        streaming = False
        try:
            self._check_model(body.model)
            try:
                order = await asyncio.to_thread(translate)
                call = Call(self.scheduler, order, request.scope.get("foretell_owner", ""))
            except Exception as error:
                raise api_error(error) from error
            line.jobs(call.jobs)
            line.note(stream=order.stream, n=order.params.n, max_tokens=order.params.max_tokens)
            form = self._format(body, order)
            call.submit()
            if order.stream:
                try:
                    first = await while_there(request.receive, call.items())
                except BaseException:
                    call.cancel()
                    raise
                streaming = True
                return self._with_id(EventStream(call, form, first, line), line)
            done = await answered(request, call, form, line)
            return self._with_id(Json(form.response(done)), line)
        except ClientGoneError:
            line.status = 499
            return Response(status_code=499)  # nobody reads it
        except ApiError as error:
            line.status = error.status
            error.headers["X-Request-Id"] = line.request_id
            raise
        except Exception:
            line.status = 500
            raise
        finally:
            if not streaming:
                line.write()

    def _format(self, body: Sampling, order: Order) -> Format:
        kind = ChatFormat if isinstance(body, ChatRequest) else CompletionFormat
        return kind(self.engine, order, self.settings.model_name, self._fingerprint)

    def _with_id(self, response: Response, line: Line) -> Response:
        response.headers["X-Request-Id"] = line.request_id
        return response


class _PageFiles(StaticFiles):
    """The page's files, with its headers."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _refused(metrics: Metrics) -> Any:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.refused(error.status)
        return error.response()

    return handle


def _invalid(metrics: Metrics) -> Any:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        metrics.refused(400)
        message, param = problem(list(error.errors()))
        return ApiError(400, message, param=param).response()

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not possible at {request.url.path[:200]}",
        400: "the body is not valid JSON",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed; its log says why", kind="server_error").response()
