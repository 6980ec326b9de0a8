"""``lln convert``: a trained softmax model made linear, judged beside what it was."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.options import mechanism_options
from lln.cli.places import file, folder
from lln.cli.running import let_waiting_threads_sleep, plain_errors


def convert(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A local Hugging Face model.")
    ],
    out: Annotated[Path, folder("Folder of the converted model and its report.")],
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
    short_windows: Annotated[
        float | None,
        typer.Option(help="Share of all updates in which near windows end after the last tokens."),
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Draw all weights anew, for comparison. They learn from the softmax model's "
            "answers in --recover-steps updates. --transfer-steps is refused.",
        ),
    ] = False,
    keep: Annotated[
        int,
        typer.Option(min=0, help="Key heads that keep softmax, with all query heads of each."),
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="In place of --keep: as many key heads as a cache of this share of softmax's "
            "holds after --context tokens, such as 1/7.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which --memory counts.")
    ] = None,
    keep_by: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help="Which key heads: retrieval (default in decoders), those without which generated "
            "recall suffers most, or error, those that differ most from softmax.",
        ),
    ] = None,
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
    held_out: Annotated[Path | None, file("File of the text that judges.")] = None,
    results: Annotated[Path | None, folder("Folder that gets a result row.")] = None,
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
            keep=_keep(keep, memory, context),
            keep_by=keep_by,
            held_out=held_out,
            judge_articles=judge_articles,
            cost_length=cost_length,
            results=results,
            device=device,
            precision=precision,
            seed=seed,
            transfer_options=_learning(transfer_rate, short_windows),
            recover_options=_learning(recover_rate, short_windows),
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


def _learning(rate: float | None, short_windows: float | None) -> dict[str, Any]:
    """Arguments of a stage that learns, those that are given."""
    given = {"learning_rate": rate, "short_windows": short_windows}
    return {name: value for name, value in given.items() if value is not None}


def _keep(keep: int, memory: str | None, context: int | None) -> Any:
    """A number of key heads, or the cache that they have to fit into."""
    from lln.conversion.settings import CacheShare

    if memory is None:
        if context is not None:
            raise ValueError(
                f"--context {context} is of --memory, which is missing; add such as --memory 1/7"
            )
        return keep
    if keep:
        raise ValueError(
            f"--keep {keep} and --memory {memory} both say how many heads keep softmax; leave one "
            "of them out"
        )
    if context is None:
        raise ValueError(
            f"--memory {memory} is a share of softmax's cache, which grows; say after how many "
            "tokens, such as --context 8192"
        )
    try:
        share = float(Fraction(memory))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--memory {memory} is not a share; give such as 1/7 or 0.15") from None
    if not 0 < share <= 1:
        raise ValueError(f"--memory {memory} is not in (0, 1]; give such as 1/7 or 0.15")
    return CacheShare(share, context)


def _show(found: dict[str, Any], out: Path) -> None:
    from lln.cli.tables import show_tables
    from lln.conversion.gain import gain_words
    from lln.conversion.page import score_tables

    show_tables(score_tables(found))
    typer.echo(gain_words(found))
    typer.echo(f"model {out}, report {out / 'report.html'}, numbers {out / 'conversion.json'}")
