"""Questions that a chat model asks itself: the prompts that scripts.distill_draft has it answer.

    python -m benchmarks.self_prompts --checkpoint PATH --count 6000 --output prompts.txt

The model continues its own chat template where a user's message would begin (Magpie,
arXiv:2406.08464), at temperature 1, question n with seed n. Questions of one line are written, one
a line, and no question twice.
"""

from pathlib import Path

from tqdm import tqdm

from cli.errors import exit_on_error, use_threads
from cli.flags import Parser
from decoding.engine import Engine
from decoding.sampling import Sampling
from loading.checkpoint import load_model
from loading.target import pick_device
from loading.tokenizer import conversation_ids, load_tokenizer

SLOTS, BATCH, MAX_TOKENS = 64, 512, 80


def questions(checkpoint: Path, count: int) -> list[str]:
    """`count` different questions. UserError for a model without a chat template."""
    tokenizer = load_tokenizer(checkpoint)
    chats = [
        conversation_ids(tokenizer, [{"role": "user", "content": text}])
        for text in ("Why", "42", "(")
    ]
    # of the prefix that all chats share
    length = next(i for i, ids in enumerate(zip(*chats)) if len(set(ids)) > 1)
    prompt = chats[0][:length]
    model = load_model(checkpoint, device=pick_device(None))
    engine = Engine(model, SLOTS, len(prompt) + MAX_TOKENS)
    texts, seed = {}, 0
    with tqdm(total=count, unit="question") as bar:
        while len(texts) < count:
            rows = [[] for _ in range(BATCH)]
            for row, id in engine.generate(
                [prompt] * BATCH,
                sampling=Sampling(1.0),
                max_new_tokens=MAX_TOKENS,
                stop_ids=tokenizer.stop_ids,
                seed=range(seed, seed + BATCH),
            ):
                rows[row].append(id)
            ended = [ids[:-1] for ids in rows if ids[-1] in tokenizer.stop_ids]
            lines = (tokenizer.decode(ids).strip() for ids in ended)
            texts |= dict.fromkeys(line for line in lines if line.isprintable() and len(line) > 10)
            seed += BATCH
            bar.update(min(len(texts), count) - bar.n)
    return list(texts)[:count]


def main() -> None:
    parser = Parser(description="Write questions that a chat model asks itself.")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a folder or a .gguf file with a chat template",
    )
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument(
        "--output", type=Path, required=True, help="file to write, one question a line"
    )
    args = parser.parse_args()
    use_threads(None)
    with exit_on_error():
        args.output.write_text("\n".join(questions(args.checkpoint, args.count)) + "\n")


if __name__ == "__main__":
    main()
