"""Gated delta nets on a GPU: kernels/delta.py.

Tokens are computed one by one, like fused_recurrent_gated_delta_rule of flash-linear-attention, so that states do not
depend on how a prompt is split into steps. Consecutive runs form a chain if each starts from the block that the
previous run writes.

Delta rule: the program of a chain's first run computes a tile of the values through all rows of the chain; programs of
the other runs do nothing. Convolution: rows are independent. The program of a chain's first run computes the first
rows, which read the old state, and writes all states of the chain; other programs compute one tile of later rows each.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.reference import LENGTH_EPS
from baton.kernels.triton.launch import DELTA_CHANNELS, DELTA_ROWS, DELTA_VALUES, KernelCall, power_of_two
from baton.kernels.triton.paged_prefill import chunk_of, first_tile
from baton.kernels.types import DeltaRates, StateInit, StateRuns

ZERO, AGAIN, BROKEN = (tl.constexpr(int(each)) for each in (StateInit.ZERO, StateInit.AGAIN, StateInit.BROKEN))
_LENGTH_EPS = tl.constexpr(LENGTH_EPS)
_LINEAR_FROM = tl.constexpr(20.0)  # for larger x, softplus(x) rounds to x


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolution_call(_with_dense_rows(x), weight.contiguous(), states, runs, output, bias, activates).start()
    return output


def convolution_call(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    output: torch.Tensor,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> KernelCall:
    channels, kernel = weight.shape
    rows = max(DELTA_ROWS, power_of_two(kernel))
    arguments = {
        "x": x,
        "weight": weight,
        "bias": weight if bias is None else bias,
        "states": states,
        "output": output,
        **_of_runs(runs),
        "alone": runs.alone,
        "x_stride": x.stride(0),
        "block_stride": states.stride(0),
        "CHANNELS": channels,
        "KERNEL": kernel,
        "TAPS": power_of_two(kernel),
        "ROWS": rows,
        "BLOCK": DELTA_CHANNELS,
        "HAS_BIAS": bias is not None,
        "ACTIVATES": activates,
    }
    # Upper bound of the tile indices passed to `chunk_of`: a tile has `rows` rows of one run, and each run may need
    # one more tile, which is partial or empty.
    tiles = (runs.alone + sum(runs.rows)) // rows - runs.alone // rows + len(runs.rows)
    return KernelCall(convolve, (len(runs.sources) + tiles, -(-channels // DELTA_CHANNELS)), arguments, warps=4)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rates: DeltaRates,
    states: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    query, key, value, decay, beta = map(_with_dense_rows, (query, key, value, decay, beta))
    rule_call(query, key, value, decay, beta, rates, states, runs, output).start()
    return output


def rule_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rates: DeltaRates,
    states: torch.Tensor,
    runs: StateRuns,
    output: torch.Tensor,
) -> KernelCall:
    heads, size = value.shape[1:]
    rows = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    arguments = {
        **rows,
        "rate": rates.rate,
        "bias": rates.bias,
        "states": states,
        "output": output,
        **_of_runs(runs),
        **{f"{name}_stride": tensor.stride(0) for name, tensor in rows.items()},
        "block_stride": states.stride(0),
        "scale": key.shape[2] ** -0.5,
        "TOGETHER": heads // key.shape[1],
        "HEADS": heads,
        "KEY_DIM": key.shape[2],
        "VALUE_DIM": size,
        "KEYS": power_of_two(key.shape[2]),
        "VALUES": DELTA_VALUES,
    }
    grid = (len(runs.sources), heads, -(-size // DELTA_VALUES))
    return KernelCall(apply_rule, grid, arguments, warps=1)


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if each of its rows is contiguous, else a contiguous copy. There may be gaps between rows."""
    return x if len(x) == 0 or x[0].is_contiguous() else x.contiguous()


def _of_runs(runs: StateRuns) -> dict[str, torch.Tensor | int]:
    return {
        "starts": runs.starts,
        "sources": runs.sources,
        "destinations": runs.destinations,
        "begins": runs.begins,
        "runs": len(runs.sources),
    }


@triton.jit
def follows(sources, destinations, run, runs):
    """Return whether `run` starts from the state that the previous run writes."""
    is_one = (run > 0) & (run < runs)
    before = tl.load(destinations + run - 1, mask=is_one, other=0)
    return is_one & (tl.load(sources + run, mask=is_one, other=0) == before)


@triton.jit
def begun(state, how):
    # NaN cannot be a global constant: Triton checks that globals are unchanged, but NaN never equals itself.
    return tl.where(how == BROKEN, float("nan"), tl.where(how == ZERO, 0.0, state))


@triton.jit
def inputs_at(x, state, how, first, places, x_stride, channels, inside, KERNEL: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the inputs of a chain at the indices `places`, in float32.

    Index KERNEL is the chain's first row, row `first` of `x`. Smaller indices are the KERNEL inputs before the chain,
    which are read from `state`.
    """
    is_old = places < KERNEL
    old = tl.load(state + places * CHANNELS + channels, mask=is_old & inside, other=0.0)
    new = tl.load(x + (first + places - KERNEL) * x_stride + channels, mask=(~is_old) & inside, other=0.0)
    return tl.where(is_old, begun(old, how), new.to(tl.float32))


@triton.jit
def convolve_rows(
    x,
    weight,
    bias,
    state,
    output,
    how,
    first,  # first row of the chain
    begin,  # first row to compute
    end,  # row after the last one to compute
    x_stride,
    channels,
    inside,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):
    was_seen = (how == AGAIN).to(tl.int64)  # 1 if the state already covers the row, else 0
    for row in range(begin, end):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(KERNEL):
            place = row - first + 1 - was_seen + tap
            seen = inputs_at(x, state, how, first, place, x_stride, channels, inside, KERNEL, CHANNELS)
            total += seen * tl.load(weight + channels * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATES:
            total = total / (1.0 + tl.exp(-total))
        tl.store(output + row * CHANNELS + channels, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def convolve_later_rows(
    x, weight, bias, states, output, starts, sources, destinations, begins, runs, alone, tile, x_stride, channels,
    inside, KERNEL: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr,
):  # fmt: skip
    """Compute a tile's rows, except rows that read the old state, which the chain's program may have overwritten."""
    tile += alone // ROWS
    chunk = chunk_of(starts + alone, runs - alone, tile, 1, ROWS)
    run = alone + chunk
    begin = tl.load(starts + run) + (tile - first_tile(starts + alone, chunk, 1, ROWS)) * ROWS
    end = tl.minimum(begin + ROWS, tl.load(starts + run + 1))
    while follows(sources, destinations, run, runs):
        run -= 1
    first = tl.load(starts + run)
    begin = tl.maximum(begin, first + ROWS)
    how = tl.load(begins + run)
    convolve_rows(
        x, weight, bias, states, output, how, first, begin, end, x_stride, channels, inside, KERNEL, CHANNELS, BLOCK,
        HAS_BIAS, ACTIVATES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["runs", "alone"])
def convolve(
    x,
    weight,
    bias,
    states,
    output,
    starts,
    sources,
    destinations,
    begins,
    runs,
    alone,
    x_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):
    run = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, taps = channels < CHANNELS, tl.arange(0, TAPS)[:, None]
    if run >= runs:
        convolve_later_rows(
            x, weight, bias, states, output, starts, sources, destinations, begins, runs, alone, run - runs, x_stride,
            channels, inside, KERNEL, CHANNELS, ROWS, BLOCK, HAS_BIAS, ACTIVATES,
        )  # fmt: skip
        return
    if follows(sources, destinations, run, runs):
        return
    kept = inside[None, :] & (taps < KERNEL)
    state = states + tl.load(sources + run) * block_stride
    how = tl.load(begins + run)
    first = tl.load(starts + run)
    was_seen = (how == AGAIN).to(tl.int64)
    end = tl.load(starts + run + 1)
    first_end, last = end, run + 1
    goes_on = follows(sources, destinations, last, runs)
    while goes_on:
        end = tl.load(starts + last + 1)
        place = end - first - was_seen + taps
        left = inputs_at(x, state, how, first, place, x_stride, channels[None, :], kept, KERNEL, CHANNELS)
        own_state = states + tl.load(destinations + last) * block_stride
        tl.store(own_state + taps * CHANNELS + channels[None, :], left, mask=kept)
        last += 1
        goes_on = follows(sources, destinations, last, runs)
    end = tl.minimum(end, first + ROWS)
    convolve_rows(
        x, weight, bias, state, output, how, first, first, end, x_stride, channels, inside, KERNEL, CHANNELS, BLOCK,
        HAS_BIAS, ACTIVATES,
    )  # fmt: skip
    # Write the first run's new state last: it may replace the old state, which all results above need.
    place = first_end - first - was_seen + taps
    left = inputs_at(x, state, how, first, place, x_stride, channels[None, :], kept, KERNEL, CHANNELS)
    own_state = states + tl.load(destinations + run) * block_stride
    tl.debug_barrier()  # all threads must have read the old state
    tl.store(own_state + taps * CHANNELS + channels[None, :], left, mask=kept)


@triton.jit
def log_of_one_more(x):
    """Return `log(1 + x)`, precise also for small x, for which `1 + x` is rounded strongly or to 1."""
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton.jit
def of_length_one(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + _LENGTH_EPS)


@triton.jit
def row_of(
    query, key, value, decay, beta, row, is_there, of_keys, of_values, head, is_key, is_value,
    query_stride, key_stride, value_stride, decay_stride, beta_stride,
):  # fmt: skip
    """Load the inputs of the delta rule for one row."""
    queries = tl.load(query + row * query_stride + of_keys, mask=is_key & is_there, other=0.0)
    keys = tl.load(key + row * key_stride + of_keys, mask=is_key & is_there, other=0.0)
    wanted = tl.load(value + row * value_stride + of_values, mask=is_value & is_there, other=0.0)
    fades = tl.load(decay + row * decay_stride + head, mask=is_there, other=0.0)
    learns = tl.load(beta + row * beta_stride + head, mask=is_there, other=0.0)
    return queries, keys, wanted, fades, learns


@triton.jit(do_not_specialize=["runs"])
def apply_rule(
    query,
    key,
    value,
    decay,
    beta,
    rate,
    bias,
    states,
    output,
    starts,
    sources,
    destinations,
    begins,
    runs,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    block_stride,
    scale,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    if follows(sources, destinations, run, runs):
        return
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    places = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    of_keys, of_values = head // TOGETHER * KEY_DIM + keys, head * VALUE_DIM + values
    own_rate, own_bias = tl.load(rate + head), tl.load(bias + head)
    state = tl.load(states + tl.load(sources + run) * block_stride + places, mask=inside, other=0.0)
    goes_on = True
    while goes_on:
        how = tl.load(begins + run)
        state = tl.where(inside, begun(state, how), 0.0)
        begin, end = tl.load(starts + run), tl.load(starts + run + 1)
        found_queries, found_keys, found_wanted, found_fades, found_learns = row_of(
            query, key, value, decay, beta, begin, begin < end, of_keys, of_values, head, is_key, is_value,
            query_stride, key_stride, value_stride, decay_stride, beta_stride,
        )  # fmt: skip
        for row in range(begin, end):
            queries, own_keys = found_queries.to(tl.float32), found_keys.to(tl.float32)
            wanted, fades = found_wanted.to(tl.float32), found_fades.to(tl.float32) + own_bias
            learning = found_learns.to(tl.float32)
            # Load the next row's inputs while this row is computed.
            found_queries, found_keys, found_wanted, found_fades, found_learns = row_of(
                query, key, value, decay, beta, row + 1, row + 1 < end, of_keys, of_values, head, is_key, is_value,
                query_stride, key_stride, value_stride, decay_stride, beta_stride,
            )  # fmt: skip
            learns = 1.0 / (1.0 + tl.exp(-learning))
            bent = tl.where(fades > _LINEAR_FROM, fades, log_of_one_more(tl.exp(fades)))
            own_keys = of_length_one(own_keys)
            decayed = state * tl.exp(own_rate * bent)
            change = (wanted - tl.sum(decayed * own_keys[:, None], 0)) * learns
            state = tl.where(how == AGAIN, state, decayed + own_keys[:, None] * change[None, :])
            made = tl.sum(state * (of_length_one(queries) * scale)[:, None], 0)
            tl.store(output + row * HEADS * VALUE_DIM + of_values, made, mask=is_value)
        tl.store(states + tl.load(destinations + run) * block_stride + places, state, mask=inside)
        run += 1
        goes_on = follows(sources, destinations, run, runs)
