"""Every number that steers the search for a plan: its unit, what it means, why this value, and the benchmark that decides it.

No setting except the user's deadline is in seconds: limits count simplex iterations and branch-and-bound nodes, so that a plan
does not depend on the speed of the machine. `planning` and `budgets` are benchmarks/planning.py (CPU seconds of a plan) and
benchmarks/budgets.py (plans under memory budgets that bind), `overlap` benchmarks/overlap.py; "relative" is a share of the
value that a number is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.solver.deadline import NEVER, Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How the search proceeds; see each field. The defaults are those of planning.

    >>> SearchSettings().near_relaxation().branch_whole
    False
    """

    gap: float = 1e-3
    """Relative gap at which branching stops. Prices are less certain than a thousandth (planning: gpt3 ends at
    0.07%)."""

    exact: bool = False
    """Branch until the gap is closed also where memory rows bind. For small problems and tests: with rows, the root node of a
    GPT-2 takes 54 CPU seconds (budgets)."""

    presolve: bool = True
    """Aggregate choices that have no price of their own (`presolve`). Off only in the test that this is exact."""

    # the bound by messages

    ascent_sweeps: int = 30
    """Sweeps of dual ascent at most: GPT-2 on (2, 2, 2) is 0.4% below the relaxation after 20 and after 40 (planning)."""

    ascent_check: int = 5
    """Sweeps between looks at the bound, which cost as much as half a sweep (not varied)."""

    ascent_gain: float = 1e-3
    """Relative gain of these sweeps below which they end: what is left to gain is less than windows are wide (not varied)."""

    # the relaxation

    integrality: float = 1e-6
    """How far from an integer a value may be: HiGHS's own feasibility tolerance for integers (mip_feasibility_tolerance)."""

    broken_row: float = 1e-6
    """Microseconds by which a link may outlast its region before the row that forbids it joins the relaxation: below the
    precision of the sums (not varied)."""

    warm_start_rows: int = 100_000
    """Rows of a program from which on its first memory rows are added to the last basis instead of presolving it again. Below
    it presolving pays; in a program that is large before there are any rows it does not (planning: gpt3)."""

    presolve_again_rows: int = 10_000
    """Rows from which on memory rows that are added to the last basis have a limit of iterations, after which the program is
    presolved again: the last basis may be far when many columns come with them (planning: llama8b; budgets: all). GPT-2 on
    (2, 2) within 700 MB, 14,069 rows without a solution: after 1,200 iterations from the last basis each takes a second, and
    they do not end in minutes; presolved, it takes 0.5 CPU seconds."""

    warm_iterations: int = 1_000
    """That limit. T5-11B within 28 GiB, 167,517 rows, is far from its last basis: 139 CPU seconds from there, 16 with twice
    this limit. Five layers of Llama-3 70B with 16 micro-batches in flight, 166,009 rows, are near: 0.3 CPU seconds, 13
    presolved."""

    unpresolved_rows: int = 30_000
    """Rows of a program from which on HiGHS solves it as it is: presolving makes rows denser, and most take more iterations
    then. Of Llama-3 70B on 512 devices, 53,703 rows of what is below a known price of two micro-batches take 4 CPU seconds, and
    17 presolved; 54,889 of the proof of one 2.5, and 12.8 (pipelines). Within 0.4 of its free peak, Llama on (2, 4) has windows
    of 34,800 rows, 3.2 and over 7.4, and 53,709 of the least memory, 4.9 and over 13. Without memory rows there is little
    between the two: T5-11B on (8, 8) is solved in 8.2 and 7.5 (planning). Smaller ones that have no solution need presolving:
    GPT-2 on (2, 4), 22,486 rows, 1.5 presolved, and no end after 20."""

    bounded_columns: int = 60_000
    """Candidates and arcs of a problem from which on, where rows bind, one wide window is relaxed with them, and not the whole
    without them and narrow windows after it, up to `weighed_columns`: Llama-3 70B on (16, 8), 64,500, takes 4.0 CPU seconds of
    relaxing, and 12 so; on 512 devices, 61,800, it takes 2.3, and 10.5 (planning, pipelines)."""

    wide_window: float = 0.25
    """By how much a solution of that window may cost more than the bound by messages, which knows no memory, relative: Llama-3
    70B costs 8.5% more on (16, 8), and 16.5% on 512 devices."""

    steepest_edge_iterations: int = 10_000
    """Simplex iterations by the steepest edge of a program without a basis, after which Devex starts anew. T5-11B on (8, 8)
    takes 26,400 of Devex, 6 CPU seconds behind this limit and 14 behind 25,000, and in all 36 and 53, side by side (planning);
    T5-3B takes 17 in all by either (overlap)."""

    devex_iterations: int = 50_000
    """Simplex iterations of Devex, after which the steepest edge goes to the end: Qwen3-Next on (2, 4), 425,585 rows, takes
    171,700 of Devex, 120 CPU seconds, and 96,300 of the steepest edge, 49 with all that is tried before (planning)."""

    devex_rows: int = 60_000
    """Rows of a program from which on Devex is used from the start where rows of memory join: GPT-3 on (8, 16, 8), 85,000 rows,
    takes 11 CPU seconds in a window of 1%, over 41 by the steepest edge, and over 16 unpresolved (planning: gpt3). So such ones
    are presolved, unless they only bound what is known. There RENS comes before a dive, which is given up after 10,000
    iterations, 5 to 11 CPU seconds, where RENS takes 0.4, and layouts are not chosen once more with what rows do not count:
    0.4% faster, for 59 CPU seconds more."""

    improving_iterations: int = 5_000
    """Simplex iterations of a relaxation whose answer can only improve a known solution, the first after new rows; not varied
    since it replaced a limit in seconds (budgets)."""

    improving_iterations_per_row: float = 2 / 5
    """The same limit per row of the program, where that is more: large programs need more (planning: gpt3; not varied)."""

    resolving_iterations: int = 1_000
    """The same limit when only bounds changed: the last basis is near (budgets; not varied)."""

    proving_iterations: int = 20_000
    """Simplex iterations of a relaxation with regions that only says how far a known solution is from the optimum: a safeguard
    (planning: llama8b does not end where rows join one by one in its window, and takes 2,100 with all from the start)."""

    relaxation_iterations: int | None = None
    """Simplex iterations after which any relaxation is given up with a SolverError; None: never. Set where an answer is only
    wanted if it comes soon: the table of strategies."""

    # regions as prices

    weights_rounds: int = 12
    """Rounds of column generation at most: GPT-3 on (8, 16, 8) takes 4, ViT-L on (8, 8) 5 (planning, overlap)."""

    weights_gap: float = 1e-3
    """Relative gap at which these rounds end; in those cases the next to last one is at 0.1 and 0.3%."""

    weighed_columns: int = 80_000
    """Candidates and arcs of a problem from which on its regions are prices: GPT-3 on (8, 16, 8), 183,000, takes
    61 CPU seconds in all, and 1,192 with rows of regions and of memory together; without those of memory 96 for a bound that is
    not found in 20,000 iterations, and 6 so (planning: gpt3). Where rows bind, they are prices, too: with messages over
    flattened axes GPT-3 takes 20 CPU seconds of solving, and was not seen to its end after 217 in windows of the whole. T5 of
    6 + 6 layers on (2, 4), 98,000, within 0.6 of its free peak: 11 CPU seconds, and 53 in a wide window, the same plan, with a
    gap of 3.9% and 0.05%."""

    far_columns: int = 20_000
    """The same where rows bind and no narrow window has a solution. Llama of 12 layers on (2, 4), 46,144, within 0.4 of its
    free peak: 19 CPU seconds, and 132 with the rows of regions, for the same plan. BERT-base there, 19,406, within 0.3 of it:
    46 and 92, but a plan 3.6% slower. All on A100."""

    # rows of memory as prices

    price_rounds: int = 12
    """Rounds of column generation at most, where rows of memory are prices: GPT-3 on (8, 16, 8) takes 1 (planning)."""

    price_shares: tuple[float, ...] = (0.8, 1.0)
    """Of a row's dual, what its bytes cost in the next round, at one price after the other: bytes that are saved together are
    charged apart, so that the whole costs less at a price than the small program, and its best bound may lie below the duals.
    GPT-3 on (8, 16, 8) has a bound of 2.3912 s at 0.8 and of 2.3812 at 1, within 40 GiB the higher one at 1 (planning)."""

    first_price: float = 0.25
    """Of the bound: what all bytes of a limit cost at first where nothing that earlier prices used keeps to it, doubled until
    something does. GPT-3 on (8, 16, 8) ends at 0.11 and 0.18 of 2.35 s for two moments (planning)."""

    # a proposal by sums, for the simulator

    proposal_window: float = 0.0
    """By how much the reduced costs of what a proposal uses may exceed the price of the best solution, relative: with 0.005, of
    ten proposals eight are the same, two are slower, and T5-3B on (2, 4) takes 3.7 CPU seconds instead of 0.8 (overlap)."""

    proposal_columns: int = 60_000
    """Candidates and arcs of that part from which on there is no proposal: where memory binds, much is below the price of the
    best solution. GPT-3 on (8, 16, 8) has 78,000, and none after 20,000 iterations, 61 CPU seconds; T5-3B on (2, 4) 51,000, and
    a better plan after 2.8 (planning, overlap; with a window of 0.005)."""

    proposal_iterations: int = 20_000
    """Simplex iterations of the relaxation of a proposal, after which it is given up (not varied)."""

    proposal_gain: float = 2e-4
    """Of the simulated step: the least by which a proposal must be faster than the plan of least price (not varied)."""

    simulated_gap: float = 5e-3
    """By how much longer than its price a simulated step must be, relative, for others to be proposed: the best by sums, and if
    it has messages over several axes at once, the best with messages over one axis each. Without these, Llama-3 70B on
    (16, 8), at 0.8%, is 2.0% slower; below, none by sums won in 17 cases, and T5-11B on (8, 8) takes 12 CPU seconds more
    (overlap, planning)."""

    simulated_gain: float = 3.5e-2
    """How much shorter than its price the simulated step of such a proposal may be, relative: at most 3.2% in the cases of
    `benchmarks/overlap.py`. Where all prices are above the best simulated step by more, none is made: in three of four."""

    # windows of reduced costs

    core_windows: tuple[float, ...] = (0.0005, 0.0025, 0.01, 0.04, 0.16)
    """By how much a solution without memory rows may cost more than the bound by messages, relative; tried in turn, until a
    window holds one, whose price says how wide it must be. A first window of 0.01 holds one in every case of planning and
    overlap, but smaller ones are solved much sooner: 100 linears on (2, 2, 2) take 49 CPU seconds in all, and 71 from 0.01 on
    (loops: linears), a core of Llama there 0.9 and 3.1."""

    largest_core: float = 0.8
    """Share of the columns from which on the whole is relaxed instead (not varied; overlap: T5-3B on (8, 8) keeps 53%)."""

    windows: tuple[float, ...] = (0.005, 0.01, 0.04, 0.16)
    """By how much a solution within memory rows may cost more than the relaxation without them, relative; tried in turn. Small
    ones first, for they are solved soonest (budgets; the steps are not varied)."""

    lean_windows: tuple[float, ...] = (0.002, 0.005, 0.01, 0.04, 0.16)
    """The same where the peak of memory is minimised: most of what can be saved is saved in the first (budgets)."""

    largest_window: float = 0.5
    """Share of the columns from which on a window is not worth building: leaving out the rest hardly pays. For the bound of a
    first limit it does: Llama on (2, 4) at 5.06 GiB takes 1.4 CPU seconds in 73% of the columns and 2.5 in all, ViT 0.21 and
    0.37, GPT-2 at 1.68 GiB 2.0 either way."""

    window_gap: float = 0.05
    """Relative gap up to which a window's solution is kept as it is. At 1% nothing better was found where that is more (GPT-2
    on (4,) at 2.75 GiB and on (2, 4) at 1.38 GiB), in 2 to 3 CPU seconds each."""

    unlikely_price: float = 10.0
    """Times the relaxation: a solution this expensive is not looked for in windows, only where there is no other
    (budgets, the smallest one of each model)."""

    # from the relaxation to integers

    dive_threshold: float = 0.9
    """Value of a pick from which on a dive fixes it to 1 together with others: lower is faster and
    fails more often (budgets; not varied)."""

    dive_backtracks: int = 2
    """Steps that a dive may take back. Two leave a dive short (budgets; not varied)."""

    dive_iterations: int = 10_000
    """Simplex iterations of one dive, after which it is given up; a safeguard (budgets; not varied)."""

    dive_gap: float = 1e-2
    """Relative gap of a dive beyond which its neighbourhood is searched by branching (`rens`): below, branching finds
    something better by less than the prices are certain (budgets)."""

    rens_nodes: int = 20
    """Branch-and-bound nodes of that search. Its columns are those that the relaxation or the dive uses, so few that it
    ends at the root where it was tried; 2 s of branching on all columns, as it was before, found less (GPT-2 on (2, 4) at
    1.38 GiB: 8.093 ms in 2.2 s, now 8.049 ms in 0.06 s). A small program that does not end at its root found nothing better
    in 100 nodes and 2.4 CPU seconds (GPT-2 on (4,) at 2.75 GiB)."""

    rens_gap: float = 1e-4
    """Relative gap at which that search stops, in tenths of a second: what it finds is what later searches must beat.
    Llama-3 70B on 512 devices: 9.1188 s, and 9.1268 at a thousandth (pipelines)."""

    small_program: int = 12_000
    """Columns up to which a program with rows is branched on wholly where a dive stays far from its bound. GPT-2 of one layer
    with a vocabulary of 4001 on four CPU processes, in half of its memory: 4.699 ms with a gap of 4.3% without, 4.349 ms proven
    optimal with it, in a root of 0.2 CPU seconds. Three blocks of an MLP on (2, 4), whose programs have 8,600 to 10,700
    columns: in 27.7 MiB 0.373 ms with a gap of 41% without, 0.339 ms proven optimal with it, in 3 CPU seconds; smaller budgets
    take 1 to 4 more."""

    member_nodes: int = 100
    """Branch-and-bound nodes of the search for whole numbers of members under the layouts of a solution; it ended at the
    root in 30 of 30 programs of twelve budgets (budgets)."""

    open_choices: float = 0.2
    """Share of choices that the relaxation leaves open up to which those are branched on with the others fixed, before all
    are: with more, fixing the others saves little (planning;
    not varied)."""

    branch_whole: bool = True
    """Whether the whole program is branched on where branching on open choices does not close the gap."""

    branch_nodes: int = 10_000
    """Branch-and-bound nodes of the whole program, after which the best solution so far is taken with its gap; none in sight is
    a SolverError. It replaces a limit of 300 s, which no case of planning came
    near."""

    # equal prices

    equal_price: float = 1e-6
    """Relative difference up to which two prices count as equal: HiGHS's feasibility tolerances are 1e-7 of a microsecond and
    sum over thousands of columns."""

    equal_conversion: float = 1e-9
    """Relative difference up to which a conversion after an op costs the same as before it (`presolve`): both are the same
    formula, so that only rounding in floating point differs."""

    # memory rows

    peak_neighbourhood: float = 1 / 16
    """Share of the step's moments within which only the highest peak brings a row: moments near each other hold the same
    tensors (budgets)."""

    tighten_least: float = 1e-4
    """Of the limit: the least by which a row that was kept but did not suffice is tightened (budgets)."""

    tighten_halvings: int = 3
    """How often what lies between the last constant of a row that did not suffice and the first that did, or that left nothing,
    is halved. None at all leaves Llama on (2, 4) at 3.26 GiB 0.7% slower than it need be (budgets)."""

    # the least memory

    least_memory_rounds: int = 12
    """Rounds of relaxing and adding rows in each window while the peak is minimised; a safeguard (budgets; not varied)."""

    least_memory_peaks: int = 3
    """Moments of one solution that bring rows in each of these rounds (budgets)."""

    critical_moments: int = 16
    """Moments of the largest memory at which the least bytes of all solutions are bounded: GPT-2's loss is among them, also
    where that of the fastest solution is larger elsewhere (budgets)."""

    least_memory_gap: float = 5e-3
    """Relative gap of the peak at which minimising it stops; and of the least memory, as reported, 1% is left (below)."""

    least_memory_step: float = 0.01
    """Of the least memory, by which less is tried until nothing is found: a BudgetError promises a hundredth."""

    peak_weight: float = 1e4
    """Objective per `scale` bytes of peak where the peak is minimised: HiGHS's absolute tolerances are small beside it."""

    time_weight: float = 1e-3
    """Weight of the step time beside the peak there: enough to decide between equal peaks, too little to trade memory."""

    # forms of a program

    free_layouts_gap: float = 1e-2
    """Relative gap of the best plan beyond which the layouts of the unconstrained optimum are tried as well, with what must be
    recomputed then: GPT-2 on (2, 4) at 1.38 GiB is 0.5% slower without, at a gap of 2.9% (budgets)."""

    once_gap: float = 1e-2
    """Share of the step that messages of weights take unhidden, beyond which gathering them once (`zero1`) is tried: that can
    win no more of these layouts. Of 15 baselines it wins on one, 0.9% where 4.3% is unhidden; on the eight below 1% it won
    nothing and took 8 of 86 CPU seconds for all."""

    strategies_gap: float = 5e-2
    """Relative gap of the best plan beyond which the named strategies are tried as well: they are points of the same search
    space, so that they can win that gap at most. At 1% they were tried on three of 18 budgets (GPT-2, ViT, Llama on (4,) and
    (2, 4)), took 4 to 8 CPU seconds, and won nothing."""

    padding_gain: float = 5e-3
    """Of the step time: the least that padding dims must win. Below, padded weights are not worth their odd shapes (planning:
    gpt2, gpt2-3d)."""

    # the user's own limit

    deadline: Deadline = NEVER
    """When the search ends with the best solution that it knows, at a moment that the user sets (`time_limit=`)."""

    below: float = math.inf
    """Seconds of a step that is known on another mesh, say: only faster ones are of use."""

    named_share: float = 1 / 4
    """Share of the time limit that is kept for the named strategies where the search of all layouts does not end: each has a
    small part of the candidates, and is solved in a small part of the time."""

    def near_relaxation(self) -> SearchSettings:
        """The settings for a search limited to solutions near a relaxation: found soon, or not at all."""
        return replace(self, branch_whole=False, exact=False)


DEFAULTS = SearchSettings()


EXACT = SearchSettings(gap=1e-9, exact=True, dive_gap=0.0, window_gap=0.0, branch_nodes=2**31 - 1, rens_nodes=2**31 - 1)
"""Settings under which the optimum is found and proven; for problems of a few choices."""
