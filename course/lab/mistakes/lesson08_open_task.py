"""Known wrong answers of lesson 08's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

LAST = "    return plan_of(min((descend(loss, start) for start in starts), key=loss))"
CONSTANT = """    def constant(batch, rate, seconds=job.seconds):
        return [Phase(batch, rate, max(1, int(seconds / job.step_seconds(batch))))]

    batches = [max(1, math.ceil(loaded * 2.0**power)) for power in range(-5, 6)]
    rates = [cliff * 2.0**-power for power in range(1, 9)]
    product = [(batch, rate) for batch in batches for rate in rates]
    every = [constant(*pair) for pair in product]

    def expected(plan):
        return expected_losses(bowl, plan)[-1]

"""
BLIND = """    plan, batch, rate = [], max(1.0, loaded / 4), 0.95 * cliff
    for _ in range(5):
        plan.append(Phase(round(batch), rate, int(job.seconds / 5 / job.step_seconds(round(batch)))))
        batch, rate = 4 * batch, rate / 1.2
    return [phase for phase in plan if phase.steps]"""
THROUGHPUT = ("this batch has the most samples per second, but its gradients have been exact for long, and it takes too few "
              "steps. Compare batches by the loss at the end of the job's time")
FEWEST = ("a batch of one needs the fewest samples, but most of its time goes into latency, and its noise stays. Compare batches "
          "by the loss at the end of the job's time")
SHORT = ("short runs prefer high rates and small batches, since noise matters only later. Each run that you compare has to take "
         "the whole time of the job")
NAN = ("a run that diverges returns NaN, every comparison with NaN is False, and `min` keeps it if it comes first. Leave it out "
       "with `math.isnan`")
BOUND = ("the best rate of a small batch, times the ratio of batches, lies beyond the cliff: a rule of scaling ends where the "
         "curvature limits the rate. Search again for the rate of your batch")

MISTAKES = {
    "plan-training": (
        Mistake("the largest batch", LAST, CONSTANT + "    return constant(math.ceil(100 * loaded), cliff / 2)", THROUGHPUT),
        Mistake("one sample at its best rate", LAST,
                CONSTANT + "    return min((constant(1, rate) for rate in rates), key=expected)", FEWEST),
        Mistake("the linear rule", LAST, CONSTANT + """    small = min((constant(1, rate) for rate in rates), key=expected)[0]
    batch = math.ceil(16 * loaded)
    return constant(batch, batch * small.rate)""", BOUND),
        Mistake("equal steps", LAST, CONSTANT + """    steps = int(job.seconds / job.step_seconds(batches[-1]))
    batch, rate, _ = min(([Phase(*pair, steps)] for pair in product), key=expected)[0]
    return constant(batch, rate)""",
                "with equally many steps the largest batch is always the best: compare at equal time, in which a smaller batch "
                "takes more steps"),
        Mistake("short runs", LAST, CONSTANT + """    brief = [constant(batch, rate, job.seconds / 50) for batch, rate in product]
    batch, rate, _ = min(brief, key=expected)[0]
    return constant(batch, rate)""", SHORT),
        Mistake("the first that diverges", LAST, CONSTANT + """    tried = [constant(1, 2 * cliff), *every]
    return min(tried, key=lambda plan: train(plan)[-1])""", NAN),
        Mistake("just below the cliff", LAST, CONSTANT + "    return constant(math.ceil(loaded), 0.97 * cliff)",
                "the highest rate that does not diverge learns fast and ends in noise: let the rate fall, or take a lower one"),
        Mistake("a rate that is too low", LAST, CONSTANT + "    return constant(math.ceil(loaded), cliff / 1000)",
                "with a rate this low the flat directions learn nothing in this time, whatever the batch: go up to the cliff"),
        Mistake("one batch and one rate", LAST, CONSTANT + "    return min(every, key=expected)",
                "no constant plan gets there: what helps early, a high rate and a small batch, leaves noise at the end. Use "
                "several phases, with a rate that falls, a batch that grows, or both, and compare several factors",
                by=("half",)),
        Mistake("one shape for all bowls", LAST, BLIND,
                "this shape of plan is good on many bowls, and on some there is a much better one: fit the bowl's numbers to "
                "your runs, and search for the best plan on that bowl", by=("near",)),
        Mistake("six runs", LAST, CONSTANT + "    for _ in range(6):\n        train(constant(1, cliff / 4))\n" + LAST,
                "fit the bowl's numbers to few runs, and try plans with `expected_losses`, which costs nothing",
                by=("few",)),
    ),
}
