"""Hand-overs and a pool between real vLLM engines on one GPU.

`scripts/gpu-engines` runs a table of *cells* (`cells`). A cell is a tiny model and two engines: P
prefills and D decodes. Each engine is one process with its engine core inside (`engine`), which
this package drives over a pipe (`pair`), so that one start serves all checks (`checks`). Several
cells run at a time (`run`). An engine's connector is ours, and remembers what its cache held when a
hold opened, a save began or a load ended (`probe`).

What is compared:

- Bytes. Every entry that D loaded is compared with the entry of P that it stands for, layer by
  layer and token by token; of recurrent states, the whole state.
- Tokens, with those of D alone, which computed the prompt before. Greedy decoding goes on after the
  end of a sequence. In fp32 all twelve tokens must be equal; prompts are drawn so that no two
  tokens are almost as good as each other. In bf16, with an fp8 cache and in long answers, an answer
  may leave the reference where that one's two best tokens are within the tolerance of each other.
- Log-probabilities of these tokens, within the tolerance: three times what D alone differs by when
  it computes the same prompt alone, among others, and on top of a prefix hit; at least `EPSILON`.
"""
