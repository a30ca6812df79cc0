"""What exercises compare answers with is right: it agrees with computations that share nothing with it."""

import os
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F

from course.lab.checks import check, notebook_cells
from course.lab.checks.exercise import all_exercises, find, known_mistakes, right, wrong
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises import lesson06_cuda_graphs
from course.lab.exercises.lesson05_compile_and_fuse import Modulate
from course.lab.exercises.lesson17_performance_model import pipeline_seconds
from course.lab.sandbox.child import installed_answers
from course.models.dit import modulate
from tests.lab.answers.scaling import BISECTED

BETWEEN = '''
import bisect

def between(target, steps, losses):
    k = bisect.bisect_left(losses, True, key=lambda loss: loss <= target)
    if k in (0, len(losses)):
        return steps[min(k, len(losses) - 1)]
    part = (losses[k - 1] - target) / (losses[k - 1] - losses[k])
    return steps[k - 1] + part * (steps[k] - steps[k - 1])
'''


@pytest.mark.parametrize("hidden", [False, True])
def test_the_answers_are_eager_training(hidden):
    """What checks compare with is not the answer alone: replays equal steps that nobody captured."""
    inputs = lesson06_cuda_graphs.draw_training(3, hidden)
    training, eager = lesson06_cuda_graphs.Training(inputs), []
    for x, y, rate in zip(inputs["x"], inputs["y"], inputs["rates"], strict=True):
        training.rate.copy_(rate)
        eager.append(torch.stack(training.step({"x": x, "y": y})))
    found = lesson06_cuda_graphs.run_static_buffers(inputs)
    assert torch.equal(found["results"], torch.stack(eager)) and torch.equal(found["weights"], training.weights())
    assert found["refused"].tolist() == [1, 1, 1, 1] and torch.equal(found["after"], found["weights"])
    assert found["runs"] == inputs["warm"] + 1 and found["replays"] == len(inputs["x"]) - inputs["warm"]

    inputs = lesson06_cuda_graphs.draw_decisions(3, hidden)
    host, losses, weights = lesson06_cuda_graphs.OnHost(inputs["weight"].clone().requires_grad_()), [], []
    for batch in lesson06_cuda_graphs.with_bad_ones(inputs):
        losses.append(lesson06_cuda_graphs.on_host(host, batch))
        weights.append(host.weight.detach().clone())
    found = lesson06_cuda_graphs.run_decided_on_device(inputs)
    for name, expected in (("plain", losses), ("losses", losses), ("weights", weights)):
        assert torch.allclose(found[name], lesson06_cuda_graphs.finite(expected), 1e-12)
    assert (found["count"], found["skipped"]) == (host.count, host.skipped) == (len(inputs["x"]), 2)


def test_modulate_is_what_the_library_computes():
    """Output and gradients are those of DiT's LayerNorm and `modulate`; gradcheck agrees."""
    generator = torch.Generator().manual_seed(0)
    x, shift, scale = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
                       for shape in ((2, 5, 6), (2, 6), (2, 6)))
    y, z = Modulate.apply(x, shift, scale, 1e-6), modulate(F.layer_norm(x, (6,), eps=1e-6), shift, scale)
    assert torch.allclose(y, z, rtol=1e-12)
    mine, its = (torch.autograd.grad(out.square().sum(), (x, shift, scale)) for out in (y, z))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(mine, its, strict=True))
    assert torch.autograd.gradcheck(Modulate.apply, (x, shift, scale, 1e-3))


def test_a_simulated_pipeline_takes_what_the_exercise_computes():
    """GPipe, played through with ranks that are not alike."""
    stages, micros = [1.0, 2.5, 1.5, 0.5], 7
    done = [0.0] * micros                            # when each micro-batch is through the ranks so far, there and back
    for seconds in [s / 3 for s in stages] + [2 * s / 3 for s in reversed(stages)]:
        free = 0.0
        for micro in range(micros):
            free = max(free, done[micro]) + seconds
            done[micro] = free
        if seconds == stages[-1] / 3:                # GPipe: backward begins when all have been forward
            done = [max(done)] * micros
    assert done[-1] == pytest.approx(pipeline_seconds(stages, micros, 1))


def outcomes(exercise, source, drawn):
    """What an answer gives of each of these inputs, here and now. To put it in its place takes longer than to run it."""
    exec(compile(source, "answer", "exec"), names := {})
    with installed_answers(exercise.objects, {name: names[name] for name in exercise.names}):
        return [outcome(exercise, inputs) for inputs in drawn]


def outcome(exercise, inputs):
    """What the answer that is in its place gives."""
    try:
        return check.Run((exercise.weighed(inputs, exercise.program(inputs)),))
    except InvalidReturn as error:
        return check.Run(error=error.text)
    except Exception as error:                       # a mistake may stop: the right answer does not
        return check.Run(error=repr(error))


def fails(exercise, run, expected):
    there, here = expected.outputs[0], (run.outputs or ({},))[0]
    return any(check.difference(there[key], here.get(key), exercise.tolerance) for key in exercise.claims)


@pytest.mark.parametrize("exercise", all_exercises().values(), ids=lambda exercise: exercise.name)
def test_each_known_mistake_is_another_answer(exercise):
    """The right answer has the piece that a mistake replaces; whether it fails, tests/lab/test_answers.py tries."""
    sources = [right(exercise), *(wrong(exercise, slip) for slip in known_mistakes(exercise))]
    assert len(set(sources)) == len(sources) > 5


@pytest.mark.slow
def test_whoever_bisects_a_curve_fails_with_the_same_hint_on_every_seed():
    """A loss rises above its target again where bisection looks, and all other curves reach it once."""
    exercise = find("samples-to-target")
    slips = [wrong(exercise, slip) for slip in known_mistakes(exercise)]
    by_hand = BISECTED.replace("float(np.interp(-target, [-loss for loss in losses], steps))", "between(target, steps, losses)")
    seeds = [(seed, hidden) for seed in range(50) for hidden in (False, True)]
    runs = [outcomes(exercise, source, (exercise.draw(*seed) for seed in seeds))
            for source in [right(exercise), BISECTED, by_hand + BETWEEN, *slips]]
    for seed, expected, one, two, *others in zip(seeds, *runs, strict=True):
        for run in (one, two):
            assert check.difference(expected.outputs[0]["samples"], run.outputs[0]["samples"], exercise.tolerance), seed
            assert "take the first time" in check.hint_for_numbers(exercise, run, expected, others), seed


QUICK = ["scaled-rate", "samples-to-target", "noise-scale", "amax-history", "delayed-scale", "in-buckets", "collective-times",
         "nodes-touched", "bytes-sent", "agrees", "block-flops", "activation-bytes", "all-reduce-seconds", "pipeline-seconds",
         "step-seconds", "translate", "fp8-cast", "qkv-rows", "zigzag", "one-document", "read-index"]
MANY = int(os.environ.get("EXERCISE_SEEDS", 60))
SLOW = ["adaln", "guidance", "dit-flops", "training-bytes", "recompute", "box-overlap", "put-together", "go-on"]


@pytest.mark.parametrize(("name", "seeds"), [*((name, 6) for name in QUICK),
                                             *(pytest.param(name, MANY, marks=pytest.mark.slow) for name in QUICK),
                                             *(pytest.param(name, MANY // 6, marks=pytest.mark.slow) for name in SLOW)])
def test_no_known_mistake_passes_because_of_the_seed(name, seeds):
    exercise = find(name)
    sources = {slip.name: wrong(exercise, slip) for slip in known_mistakes(exercise)}
    expected, *others = (outcomes(exercise, source, (exercise.draw(seed, False) for seed in range(seeds)))
                         for source in [right(exercise), *sources.values()])
    for slip, found in zip(sources, others, strict=True):
        for seed, run in enumerate(found):
            assert fails(exercise, run, expected[seed]), (slip, seed)
            assert not run.error.startswith("NameError"), f"{slip}: {run.error}"


RULES = {                                            # for whether curves agree that are not the lesson's
    "a threshold": "gap <= {threshold}", "some windows": "({each} <= {seeds}).double().mean() >= {share}",
    "the largest window": "{each}.max() <= spread", "the largest of both": "{each}.max() <= {seeds}.max()",
    "twice the spread": "gap <= 2 * spread", "above alone": "((own - means[0]) / means[0]).mean() <= spread"}


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_by_another_rule_fails_on_every_seed(rule):
    """Whatever the threshold, whatever the share of the windows."""
    exercise = find("agrees")
    drawn = [exercise.draw(seed, seed % 2 > 0) for seed in range(10)]
    expected = outcomes(exercise, right(exercise), drawn)
    for number in range(20):
        text = RULES[rule].format(threshold=0.3 * (number + 1) / 20, share=(number + 1) / 20, seeds="(means.std(0) / means[0])",
                                  each="((own - means[0]).abs() / means[0])")
        source = right(exercise).replace("gap <= spread", text)
        for seed, run in enumerate(outcomes(exercise, source, drawn)):
            assert fails(exercise, run, expected[seed]), (text, seed)


SEEDS = (3, 4, 2**100 + 1, 2**90 + 5)
CONSTANT = {                                         # outputs of hidden inputs that are the same for each of these seeds
    "relative-l2": "each weight kept",
    "training-step": "free kept",
    "named-parts": "parts raised begun quiet",
    "busy-time": "few kept",
    "exposed-time": "hidden kept",
    "memory-peak": "none kept",
    "read-ahead": "thread prompt raised ended",
    "loader": "ahead crowd ended kept raised together meanwhile",
    "fp8-cast": "type before kept",
    "amax-history": "kept",
    "delayed-scale": "empty",
    "half-trainer": "kept once small stall",
    "fused-modulate": "excess kept",
    "graph-break": "zeros values shapes quiet graphs",
    "whole-block": "again free graph kept kernels largest_tensor quiet shapes values",
    "static-buffers": "kept refused",
    "decided-on-device": "free count skipped",
    "graph-gain": "kept",
    "graph-trainer": "captured kept launches reads stall",
    "in-buckets": "order none",
    "samples-to-target": "never",
    "plan-training": "few half near",
    "bytes-sent": "kept",
    "place-ranks": "best default few some",
    "zigzag": "there",
    "recompute": "excess",
    "loss-in-chunks": "sparing passing light early kept",
    "read-index": "kind mapped refused",
    "convert-foreign": "copies formats once",
    "adaln": "kept",
    "guidance": "passes precision",
    "dit-flops": "counted",
    "diagnose": "few fewest",
    "plan-layout": "few some",
    "box-overlap": "single",
    "put-together": "read single",
    "translate": "kept",
    "publish": "half none",
    "pipeline-seconds": "kept",
    "rendezvous": "port own later",
    "go-on": "again late needless torn status",
    "survive": "again left most status writes",
    "batch-script": "lint heard slept",
    "accumulate": "format whole_seen micro_seen micro_turns micro_free scaled_seen scaled_cast",
    "ring-all-reduce": "alone right one came sent intact thrifty kept",
    "average-gradients": "together lean absent one",
    "overlap": "whole_sizes whole_beside micro_sizes micro_beside branches_beside branches_when lean awaited patient",
    "copy-reduce": "sent kept",
    "column-row": "format sent lean",
    "parallel-block": "sent lean",
    "run-schedule": "alive order overlap sent",
    "causal-attention": "sent small kept overlap",
    "sharded-adam": "kept sent",
    "data-parallel": "sent few lean begins patient",
    "gather-scatter": "sent_whole sent_sum kept",
    "gather-in-order": "kept sent",
    "merge": "kept",
    "visible": "causal_work all_work",
    "gpipe": "meet order",
    "1f1b": "meet own kept",
    "zero-optimizer": "states lean shares kept",
    "sharded-unit": "before freed kept sent lean",
    "reduce-gradients": "dropped kept calls sent",
    "exchange-rows": "sent",
    "through-experts": "computed sent",
    "place-experts": "balanced few missing near slots twice",
    "gradient-norm": "sent",
    "train-it": "memory again one time lost skill",
    "step-events": "ahead most gathers late reduces left",
    "order-step": "left limit near order there",
    "write-text": "grows kept prompt sent small",
    "vocabulary-embedding": "kept sent",
    "vocabulary-loss": "numbers kept",
    "copy": "loads stores programs tiles alone guards",
    "fused-gelu": "bf16 loads stores bias programs tiles alone guards",
    "row-softmax": "bf16 loads stores programs alone guards",
    "add-norm": "bf16 rounded loads stores weights programs alone guards",
    "add-norm-backward": "bf16 loads stores weights programs alone guards",
    "cross-entropy": "gradient digits stored block spread apart alone beside guards reads over skipped",
    "online-softmax": "bf16",
    "flash-forward": "ranges bf16 reads guards masks",
    "flash-backward": "ranges bf16 reads",
}


# processes, or long
APART = ["rendezvous", "batch-script", "diagnose", "place-ranks", "whole-block", "convert-foreign", "plan-training"]
LONG = [*APART, "flash-forward", "flash-backward", "loss-scaler", "half-trainer", "add-norm", "add-norm-backward",
        "cross-entropy", "order-step", "place-experts", "loader", "read-ahead", "online-softmax"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if max(exercise.sizes) > 1 or name in LONG else [])
                                  for name, exercise in all_exercises().items()])
def test_outputs_made_for_one_seed_fail_on_every_other(name):
    """Files that an answer wrote on other inputs, however right, give no point: some output is another for every seed. What never
    varies is listed above, claim by claim, so that a new one is a decision.

    It does not prove that an output cannot be had without the work: who reads the inputs and knows what is right can compute it.
    """
    exercise = find(name)
    drawn = [exercise.draw(seed, hidden) for hidden in (False, True) for seed in SEEDS]
    if max(exercise.sizes) > 1 or name in APART:
        answers = [(notebook_cells.whole_answer(right(exercise)), inputs) for inputs in drawn]
        runs, _ = check.run_answers(exercise, answers, max(exercise.sizes), None)
    else:
        runs = outcomes(exercise, right(exercise), drawn)
    assert not any(run.error for run in runs)
    for one, other in permutations(runs, 2):
        assert fails(exercise, one, other), "files made at home pass"
    hidden = runs[len(SEEDS):]
    same = {key for key in exercise.claims if all(equal(run, hidden[0], key) for run in hidden)}
    assert same == set(CONSTANT.get(name, "").split())


def equal(run, other, key):
    return all(torch.equal(here[key], there[key]) for here, there in zip(run.outputs, other.outputs, strict=True))


COUNTED = ["kernels", "nodes-touched", "narrowest-link", "in-buckets", "zigzag", "qkv-rows", "lay-out", "groups",
           "training-bytes", "fused-bytes"]


@pytest.mark.parametrize("name", COUNTED)
def test_outputs_of_whole_numbers_cannot_be_guessed(name):
    """Of a thousand outcomes that are equally likely, 300 draws would meet one that came before 41 times. For those whose
    outputs are nothing but small whole numbers."""
    exercise = find(name)
    runs = outcomes(exercise, right(exercise), (exercise.draw(seed, True) for seed in range(300)))
    seen = {tuple(tuple(outputs[key].double().flatten().tolist()) for key in sorted(exercise.claims))
            for outputs, in (run.outputs for run in runs)}
    assert len(seen) > 300 - 20, len(seen)
