"""``lln convert``: a trained softmax model made linear, judged beside what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.options import mechanism_options
from lln.cli.running import let_waiting_threads_sleep, plain_errors


def convert(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A local Hugging Face model.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the converted model and its report.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text: a file, or a folder with files per split; default LLN_DATA, else the "
            "bundled Tiny Shakespeare, to try it out."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens of a sequence; default 512, for decoders 2,048."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of an update.")] = 2,
    transfer_steps: Annotated[
        int | None, typer.Option(min=0, help="Updates of transfer; default 300.")
    ] = None,
    transfer_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate of transfer; default 2e-2.")
    ] = None,
    recover_steps: Annotated[int, typer.Option(min=0, help="Updates of recovery.")] = 100,
    recover_rate: Annotated[
        float | None,
        typer.Option(help="Highest learning rate of recovery; default 2e-5, from scratch 5e-4."),
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Draw all weights anew, for comparison. They learn from the softmax model's "
            "answers in --recover-steps updates. --transfer-steps is refused.",
        ),
    ] = False,
    keep: Annotated[str, typer.Option(help="Layers that keep softmax: 0, n, or auto.")] = "0",
    keep_heads: Annotated[
        str, typer.Option(help="Heads of other layers that keep softmax: 0, n, or auto.")
    ] = "0",
    budget: Annotated[
        float,
        typer.Option(
            help="`auto` keeps heads or layers until attention takes this many times as long as "
            "with nothing kept."
        ),
    ] = 1.25,
    attention: Annotated[
        str, typer.Option(help="The new attention: a name of `lln list`.")
    ] = "lln_nearfar",
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the attention. Repeat."),
    ] = None,
    require: Annotated[
        float | None, typer.Option(help="Exit with 1 if the agreement is less than this number.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(help="File of the text that judges.")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder that gets a result row.")] = None,
    judge_articles: Annotated[int, typer.Option(min=1, help="Articles that judge.")] = 200,
    cost_length: Annotated[
        int | None, typer.Option(min=0, help="The longest input that is timed; 0 times nothing.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default by machine.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for autocast.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of the order of the text.")] = 0,
) -> None:
    """Give a trained softmax model linear attention.

    The new attention is calibrated. In transfer every layer learns what softmax answered in that
    layer. In recovery all weights learn what the softmax model answers. Text that the model has not
    seen judges the result. --out gets model, tokenizer, report.html and conversion.json. The same
    command again goes on after a kill.

    The agreement is the mean cosine of the embeddings of both models (encoders), or the perplexity
    of the softmax model divided by the perplexity of the new model (decoders).
    """
    with plain_errors("lln convert"):
        kept, kept_heads = _keep("--keep", keep), _keep("--keep-heads", keep_heads)
        let_waiting_threads_sleep()
        from lln.conversion.run import convert_and_judge, met
        from lln.conversion.settings import Settings

        settings = Settings(
            model,
            data,
            out,
            length=length,
            batch_size=batch_size,
            attention=attention,
            options=mechanism_options(option, "--set"),
            transfer_steps=_transfer_steps(transfer_steps, from_scratch),
            recover_steps=recover_steps,
            keep=kept,
            keep_heads=kept_heads,
            budget=budget,
            held_out=held_out,
            judge_articles=judge_articles,
            cost_length=cost_length,
            results=results,
            device=device,
            precision=precision,
            seed=seed,
            transfer_options=_rate(transfer_rate),
            recover_options=_rate(recover_rate),
            from_scratch=from_scratch,
        )
        found = convert_and_judge(settings, typer.echo)
        _show(found, out)
        if require is not None and met(found, require):
            typer.echo(f"the agreement is {found['agreement']}: --require {require} is met")
        if not met(found, require):
            typer.echo(
                f"the agreement with the softmax model is {found['agreement']}, less than "
                f"--require {require}",
                err=True,
            )
            raise typer.Exit(1)


def _transfer_steps(given: int | None, from_scratch: bool) -> int:
    """As many as are given, which ``Settings`` refuses from scratch; usually 300, there none."""
    if given is None:
        return 0 if from_scratch else 300
    return given


def _rate(given: float | None) -> dict[str, Any]:
    return {} if given is None else {"learning_rate": given}


def _keep(name: str, text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit():
        raise typer.BadParameter(f"{name} {text!r} is neither a number nor auto")
    return int(text)


def _show(found: dict[str, Any], out: Path) -> None:
    from lln.cli.tables import show_tables
    from lln.conversion.gain import gain_words
    from lln.conversion.page import score_tables

    show_tables(score_tables(found))
    typer.echo(gain_words(found))
    typer.echo(f"model {out}, report {out / 'report.html'}, numbers {out / 'conversion.json'}")
