"""Commands and options; what they do is in the other files of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from foretell._engine import DRAFTERS
from foretell._sampling import SamplingParams
from foretell._version import __version__
from foretell.cli import _load
from foretell.cli._errors import reported
from foretell.server._settings import Settings

EXIT_CODES = (
    "Exit codes: 0 fine; 1 something differed that must not (only where outputs are compared); 2 "
    "could not run (the reason is on stderr); 130 interrupted with Ctrl-C."
)
PLAIN_EXIT_CODES = (
    "Exit codes: 0 fine; 2 could not run (the reason is on stderr); 130 interrupted with Ctrl-C."
)
GENERATE_EXIT_CODES = (
    "Exit codes: 0 fine; 1 --compare found a difference; 2 could not run (the reason is on "
    "stderr); 130 interrupted with Ctrl-C."
)
TUNE_EXIT_CODES = (
    "Exit codes: 0 fine; 1 a setting gave another output than plain decoding; 2 could not run (the "
    "reason is on stderr); 130 interrupted with Ctrl-C, and what was measured is reported."
)
BENCH_EXIT_CODES = (
    "Exit codes: 0 fine; 1 foretell's output differed from its plain output; 2 could not run, or "
    "an --engine gave no result (the reason is on stderr); 130 interrupted with Ctrl-C, and what "
    "was measured is reported."
)
CHECK_EXIT_CODES = (
    "Exit codes: 0 every guarantee held; 1 one is broken; 2 could not run, or not be trusted (the "
    "reason is on stderr, or in the report); 130 interrupted with Ctrl-C."
)
SERVE_EXIT_CODES = (
    "Exit codes: 0 stopped by SIGTERM or Ctrl-C; 2 could not run (the reason is on stderr); 130 "
    "stopped by a second signal, without waiting."
)

BRACES = dict.fromkeys(map(ord, "{}"))


class Command(typer.core.TyperCommand):
    """A command whose usage line shows required arguments as NAME or NAME..., without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.translate(BRACES) for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    help="Speculative decoding that makes language models faster without changing one token.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(
    help="List the models on this machine; see also its two commands.",
    epilog=PLAIN_EXIT_CODES,
    invoke_without_command=True,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    epilog=BENCH_EXIT_CODES,
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench", short_help="Compare engines on the same prompts.")

DRAFTER_NOTES = {
    "suffix": "what followed the same words earlier in the text",
    "recycling": "what the model itself thought likely after the same token",
    "prompt_lookup": "like suffix, the latest match alone",
    "draft_model": "asks the small model of --draft",
    "ngram": "guesses from word counts of the text, also where nothing repeats",
    "early_exit": "the model's own first layers, a third or with early_exit:6 six; backend "
    "transformers",
}

Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Target model: 'demo', a folder, a GGUF file, or a name on the hub.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="MODEL", help="Draft model, in the same forms; same vocabulary."
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="Drafter to ask: "
        + "; ".join(f"{name} ({DRAFTER_NOTES[name]})" for name in DRAFTERS)
        + ". Repeatable.",
        show_default="suffix, recycling and, if --draft is given, draft_model",
    ),
]


def _num_draft_tokens(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a whole number from 0")
    return int(text)


NumDraftTokens = Annotated[
    Any,
    typer.Option(
        parser=_num_draft_tokens,
        metavar="N",
        help="Most tokens to draft at a step; auto drafts what pays, 0 is plain decoding.",
    ),
]
Dtype = Annotated[
    Literal["native", "float32", "bfloat16", "float16", "int8"],
    typer.Option(
        help="What the weights are kept in; native is as the file has them. int8 is the cpu "
        "backend's, float16 the other's."
    ),
]
Backend = Annotated[
    Literal["auto", "cpu", "transformers"],
    typer.Option(
        help="Who runs the model: cpu knows a few families, transformers (an extra, "
        "see docs/transformers.md) runs the rest, and GPUs (untested)."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Where torch runs it, such as cuda.", show_default="the processor"
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="With transformers: whether a token's numbers must not depend on the rest of a pass.",
        show_default="where that is possible: float32 on the processor",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attn-implementation",
        metavar="NAME",
        help="With transformers: its attention, such as eager or sdpa.",
        show_default="Foretell's",
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="With transformers: run Python code that comes with a model."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Threads; they never change the output.", show_default="one a core"
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[
    float,
    typer.Option(min=0, metavar="X", help="0 takes the best token, larger is more random."),
]
TopP = Annotated[
    float,
    typer.Option(
        min=0, max=1, metavar="X", help="Sample from the fewest best tokens that reach X."
    ),
]
TopK = Annotated[
    int, typer.Option(min=-1, metavar="N", help="Sample from the N best tokens; 0 is all.")
]
MinP = Annotated[
    float,
    typer.Option(
        min=0, max=1, metavar="X", help="Leave out tokens below X times the best one's probability."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="The same seed gives the same output.", show_default="drawn"
    ),
]
Verification = Annotated[
    Literal["match", "rejection", "block"],
    typer.Option(
        metavar="RULE",
        help="How drafts are accepted when sampling: match (the very tokens of plain decoding), "
        "rejection or block (their exact distribution; they can accept more where the drafter "
        "draws from one of its own: draft_model, ngram).",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Text that ends the output and is not part of it. Repeatable."
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message, for the chat template.")
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json, where the model does not bring its own.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]
DEFAULTS = SamplingParams()
SERVER = Settings("demo")
DEFAULT_MAX_TOKENS = DEFAULTS.max_tokens or 256


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretell {__version__}")
        raise typer.Exit


@app.callback()
def foretell(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command(epilog=GENERATE_EXIT_CODES, context_settings={"allow_extra_args": True})
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt, in quotes, or - to read it from stdin."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    model: Model = "demo",
    draft: DraftModel = None,
    drafter: Drafters = None,
    num_draft_tokens: NumDraftTokens = "auto",
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    seed: Seed = None,
    verification: Verification = "match",
    stop: Stop = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode plainly; show both speeds of decoding (without reading the prompt) "
            "and whether tokens agree.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Answer or continue a prompt.

    The text is streamed to stdout. On a terminal, tokens that were drafted and accepted are
    green (not with NO_COLOR) and a summary follows; a pipe gets the text and one line end. A
    prompt from a file or stdin loses its last line end.
    """
    with reported(debug):
        from foretell.cli import _compare, _generate
        from foretell.cli._options import refuse_ignored
        from foretell.cli._prompt import check_text, check_texts, read_prompt

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=check_texts(stop, "--stop"),
        )
        refuse_ignored(sampling, verification, num_draft_tokens, drafter or (), draft)
        request = _generate.Request(
            read_prompt(prompt, file, context.args),
            check_text(system, "--system"),
            raw,
            sampling,
            num_draft_tokens,
            verification,
        )
        run = _compare.compare if compare else _generate.generate
        if compare:
            request = _compare.comparable(request)
        options = _load.ModelOptions(
            model,
            draft,
            tuple(drafter or ()),
            dtype,
            threads,
            tokenizer,
            backend=backend,
            device=device,
            exact=exact,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        code = run(_load.load_engine(options), request, as_json=json)
    raise typer.Exit(code)


@app.command(epilog=PLAIN_EXIT_CODES)
def chat(
    model: Model = "demo",
    draft: DraftModel = None,
    drafter: Drafters = None,
    num_draft_tokens: NumDraftTokens = "auto",
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    seed: Seed = None,
    verification: Verification = "match",
    stop: Stop = None,
    system: System = None,
    debug: Debug = False,
) -> None:
    """Hold a conversation; the cache is kept between turns.

    /exit or Ctrl-D leaves, /reset starts over. Ctrl-C stops an answer, a second one leaves.
    From a pipe, every line is a turn.
    """
    with reported(debug):
        from foretell.cli import _chat
        from foretell.cli._options import refuse_ignored
        from foretell.cli._prompt import check_text, check_texts

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=check_texts(stop, "--stop"),
        )
        refuse_ignored(sampling, verification, num_draft_tokens, drafter or (), draft)
        options = _load.ModelOptions(
            model,
            draft,
            tuple(drafter or ()),
            dtype,
            threads,
            tokenizer,
            backend=backend,
            device=device,
            exact=exact,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        code = _chat.chat(
            _load.load_engine(options),
            check_text(system, "--system"),
            sampling,
            num_draft_tokens,
            verification,
        )
    raise typer.Exit(code)


@app.command(
    epilog=CHECK_EXIT_CODES,
    short_help="Prove on this machine that speculation changes nothing.",
)
def check(
    model: Model = "demo",
    draft: DraftModel = None,
    drafter: Drafters = None,
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts to compare on, one on a line.",
            show_default="a few of its own",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check another engine: an OpenAI-compatible server that speculates.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The same server without speculation, for --endpoint."),
    ] = None,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="Check transformers' assisted generation on --model, a folder or a name on the "
            "hub (with --draft as the assistant, else by prompt lookup).",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer of everything.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Draws the tables and the samples.")
    ] = 0,
    debug: Debug = False,
) -> None:
    """Prove on this machine that speculation changes nothing, or find where it does.

    Exact distributions on small tables, samples, and the bits of tokens, log-probabilities and
    cache on your own model; then errors planted on purpose, which must all be found.
    docs/losslessness.md explains the report.
    """
    with reported(debug):
        from foretell.cli import _check

        code = _check.check(
            _load.ModelOptions(
                model,
                draft,
                tuple(drafter or ()),
                dtype,
                threads,
                tokenizer,
                backend=backend,
                device=device,
                exact=exact,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            ),
            _check.Others(endpoint, reference, transformers),
            prompts,
            quick=quick,
            as_json=json,
            seed=seed,
        )
    raise typer.Exit(code)


@app.command(epilog=SERVE_EXIT_CODES, short_help="Serve a model to OpenAI-compatible clients.")
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="Target model: 'demo', a folder, a GGUF file, or a name on the hub.",
            show_default="demo",
        ),
    ] = "demo",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Key that requests must send. Repeatable; better set FORETELL_API_KEYS (keys with "
            "spaces between), which other users of the machine cannot see.",
            show_default="none",
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What requests call the model.", show_default="the name of MODEL"
        ),
    ] = None,
    draft: DraftModel = None,
    drafter: Drafters = None,
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    max_running: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most completions to work on at a time.")
    ] = SERVER.max_running,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most requests that wait; more get a 429.")
    ] = SERVER.max_queue,
    max_request_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Most tokens of prompt and answer together.",
            show_default="the model's context",
        ),
    ] = None,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Most tokens of all requests that run together.",
            show_default="as memory allows",
        ),
    ] = None,
    default_max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="For requests that do not set max_tokens.")
    ] = SERVER.default_max_tokens,
    memory: Annotated[
        int | None,
        typer.Option(
            min=16,
            metavar="MIB",
            help="Memory for all requests and the prefix cache.",
            show_default="half of what is free",
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Largest request.")
    ] = SERVER.max_body_bytes,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest time for a request.")
    ] = SERVER.request_timeout,
    grace: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Time to finish what runs, when asked to stop."
        ),
    ] = SERVER.grace,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Site whose pages may ask. Repeatable.", show_default="none"
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of this machine that requests may use. Repeatable.",
            show_default="localhost and IP addresses",
        ),
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log the text of prompts and answers, too.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a model to OpenAI-compatible clients, and a page to try it at /.

    Requests share passes, and each gets the very tokens that it would get alone. The log, a JSON
    object a line, goes to stderr. docs/server.md explains requests, limits and metrics.
    """
    with reported(debug):
        from foretell.cli import _serve

        code = _serve.serve(
            _load.ModelOptions(
                model,
                draft,
                tuple(drafter or ()),
                dtype,
                threads,
                tokenizer,
                remembers=True,
                backend=backend,
                device=device,
                exact=exact,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            ),
            host,
            port,
            memory,
            {
                "model_name": served_name or _serve.name_of(model),
                "api_keys": _serve.keys(api_key),
                "max_running": max_running,
                "max_queue": max_queue,
                "max_request_tokens": max_request_tokens,
                "max_total_tokens": max_total_tokens,
                "default_max_tokens": default_max_tokens,
                "max_body_bytes": max_body,
                "request_timeout": timeout,
                "grace": grace,
                "cors_origins": tuple(cors_origin or ()),
                "allowed_hosts": tuple(allowed_host or ()),
                "log_prompts": log_prompts,
            },
        )
    raise typer.Exit(code)


@bench_app.callback()
def bench(
    context: typer.Context,
    model: Model = "demo",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE",
            help="Engine to compare: foretell, transformers, llama.cpp, openvino, or openai (a "
            "server). Alone it stands for all its modes; KIND:MODE is one of them; options "
            "follow after commas, as in foretell:auto,dtype=int8. docs/bench.md has all. "
            "Repeatable.",
            show_default="foretell: plain and auto",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions: Spec-Bench's JSONL, or a text file with a prompt on each line.",
            show_default="six of its own, for a quick look",
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only questions of this category. Repeatable."),
    ] = None,
    per_category: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Only N questions of each category.", show_default="all"
        ),
    ] = None,
    draft: DraftModel = None,
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    max_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Most tokens of an answer.")
    ] = 128,
    repetitions: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often everything is measured.")
    ] = 3,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    seed: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="The same for every engine that samples."),
    ] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue questions as they are, without chat template.")
    ] = False,
    passes: Annotated[
        bool,
        typer.Option(
            "--passes", help="Also measure T(k), a pass of k tokens, against the machine's limits."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the record here; report reads it again."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with tables and plots."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the record instead of tables.")
    ] = False,
    transformers_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON", help="A Python that has torch and transformers, if this one has not."
        ),
    ] = None,
    openvino_python: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="A Python that has openvino-genai."),
    ] = None,
    llama_server: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="llama.cpp's llama-server.", show_default="the one on the path"
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare engines on the same prompts, in turn, and say how much faster each is.

    Every engine runs in a process of its own; outputs are compared with the engine's own plain
    output. Peers that are not installed are skipped. docs/bench.md explains the numbers.
    """
    if context.invoked_subcommand is not None:
        return
    with reported(debug):
        from foretell.bench._engines import places_of
        from foretell.cli import _bench
        from foretell.cli._options import sampled

        options = _bench.Options(
            places=places_of(
                model,
                draft,
                tokenizer,
                threads,
                llama_server,
                {"transformers": transformers_python, "openvino": openvino_python},
                {
                    "backend": backend,
                    "device": device,
                    "exact": exact,
                    "attn_implementation": attn_implementation,
                    "trust_remote_code": trust_remote_code,
                },
            ),
            engines=tuple(engine or ()),
            dtype=dtype,
            workload=workload,
            categories=tuple(category or ()),
            per_category=per_category,
            max_tokens=max_tokens,
            repetitions=repetitions,
            chat=not raw,
            passes=passes,
            output=output,
            page=html,
            sampling=sampled(temperature, top_p, top_k, min_p, seed),
        )
        code = _bench.bench(options, as_json=json)
    raise typer.Exit(code)


@bench_app.command(
    "report", cls=Command, epilog=PLAIN_EXIT_CODES, short_help="Show what records say."
)
def bench_report(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD", help="What --output has written.")
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with tables and plots."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show what records say, each by itself: runs at different times are not compared."""
    with reported(debug):
        from foretell.cli import _bench

        code = _bench.report(records, html, as_json=json)
    raise typer.Exit(code)


@app.command(
    cls=Command,
    epilog=TUNE_EXIT_CODES,
    short_help="Measure which drafters and lengths pay for a model here.",
)
def tune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="'demo', a folder, a GGUF file, or a name on the hub."
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts like yours, one on a line, or Spec-Bench's JSONL.",
            show_default="six of its own",
        ),
    ] = None,
    draft: DraftModel = None,
    dtype: Dtype = "native",
    threads: Threads = None,
    tokenizer: TokenizerFile = None,
    backend: Backend = "auto",
    device: Device = None,
    exact: Exact = None,
    attn_implementation: Attention = None,
    trust_remote_code: RemoteCode = False,
    max_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Most tokens of an answer.")
    ] = 64,
    repetitions: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often everything is measured.")
    ] = 2,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure which drafters and lengths pay for a model on this machine, and how much.

    Each drafter is tried alone at several lengths beside plain decoding and the default, which
    decides at every step. What passes cost is kept for the engines that use the model next.
    """
    with reported(debug):
        from foretell.cli import _tune

        options = _load.ModelOptions(
            model,
            draft,
            (),
            dtype,
            threads,
            tokenizer,
            backend=backend,
            device=device,
            exact=exact,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        code = _tune.run(
            options, prompts, max_tokens=max_tokens, repetitions=repetitions, as_json=json
        )
    raise typer.Exit(code)


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the models on this machine; pull fetches one, where tells its path."""
    if context.invoked_subcommand is None:
        with reported(debug=False):
            from foretell.cli import _models

            _models.show_cached()


@models_app.command("pull", cls=Command, epilog=PLAIN_EXIT_CODES)
def models_pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="'demo', or a name on the hub.")],
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache."""
    with reported(debug):
        from foretell.cli import _models

        _models.pull(name)


@models_app.command("where", cls=Command, epilog=PLAIN_EXIT_CODES)
def models_where(
    name: Annotated[str, typer.Argument(metavar="NAME", help="'demo', or a name on the hub.")],
    debug: Debug = False,
) -> None:
    """Print where a model lies on this machine."""
    with reported(debug):
        from foretell.cli import _models

        _models.where(name)
