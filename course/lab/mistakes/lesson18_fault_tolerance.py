"""Known wrong answers of lesson 18, of what survives."""

from course.lab.checks.exercise import Mistake

HANDLER = "        nonlocal asked\n        asked = True\n"
LOOP = "    while done < last and not asked:\n"
STOP = "    if saved < done:\n        save(done)\n"
STATUS = "    return 0 if done == last else 75\n"
LOST = "save / interval + (interval / 2 + restart) / between"

MISTAKES = {
    "go-on": (
        Mistake("nobody listens", "    signal.signal(signal.SIGUSR1, hear)\n", "",
                "there is no handler for USR1, whose default is to end the process at once: call signal.signal(signal.SIGUSR1, "
                "...) first of all"),
        Mistake("listens after loading", "    signal.signal(signal.SIGUSR1, hear)\n    done = saved = load()\n",
                "    done = saved = load()\n    signal.signal(signal.SIGUSR1, hear)\n",
                "a signal may arrive while the checkpoint is loaded: install the handler before"),
        Mistake("saves in the handler", HANDLER, HANDLER + "        save(done)\n",
                "the handler saves, but it may interrupt the loop within a step or within another save: it should only set a "
                "flag", stops="InvalidReturn"),
        Mistake("leaves from the handler", HANDLER, HANDLER + "        raise SystemExit(75)\n",
                "the handler ends the process within a step or a save, so all work since the newest checkpoint is lost: set a "
                "flag in the handler, and finish the step", stops="InvalidReturn"),
        Mistake("stops without saving", STOP, STOP.replace("saved < done", "saved < done == last"),
                "it stops without saving, so the steps since the newest checkpoint are done again: save before you return"),
        Mistake("looks only when a checkpoint is due", LOOP, "    while done < last and not (asked and done == saved):\n",
                "it stops at the next regular checkpoint, which may come too late: test the flag after every step, and save "
                "there"),
        Mistake("never stops", LOOP, "    while done < last:\n",
                "it receives the signal but continues to the end: test the flag after every step. If the handler sets a "
                "variable of `go_on`, declare it `nonlocal`"),
        Mistake("from the start", "done = saved = load()", "done = saved = load() * 0",
                "load() returns the step of the checkpoint, but the loop starts from step 1: continue with the next step"),
        Mistake("the checkpoint's step again", LOOP, "    done = max(0, done - 1)\n" + LOOP,
                "the step of the checkpoint is already done: continue with the next one, load() + 1"),
        Mistake("saves every step", "        if done % every == 0:\n", "        if True:\n",
                "it saves after every step, which costs more than training: save every `every` steps, and when it stops"),
        Mistake("no save at the end", STOP, "    if asked and saved < done:\n        save(done)\n",
                "the run may end at a step that `every` does not divide, and then nobody saves the last ones: save at the end"),
        Mistake("saves twice", STOP, "    save(done)\n",
                "it may write a checkpoint that already exists, if the signal arrives during a save or during loading"),
        Mistake("always done", STATUS, "    return 0\n",
                "it returns 0 when it was stopped too, so nothing requeues the job: return 75 unless step `last` is done"),
        Mistake("never done", STATUS, "    return 75 if asked else 0\n",
                "after a signal in the last step it returns 75, and the job is requeued for nothing: return 0 when step `last` "
                "is done"),
    ),
    "checkpoint-interval": (
        Mistake("one node's failures", "mtbf / nodes", "mtbf",
                "the job stops when any of its nodes fails: that is `nodes` times as often as one node fails"),
        Mistake("more nodes fail less", "mtbf / nodes", "mtbf * nodes",
                "more nodes fail more often, not less often: the time between failures of the job is mtbf / nodes"),
        Mistake("a whole interval is lost", "math.sqrt(2 * save * between)", "math.sqrt(save * between)",
                "on average a failure comes in the middle of an interval, so half of it is lost: with interval / 2, the "
                "minimum has a 2 under the root"),
        Mistake("no root", "math.sqrt(2 * save * between)", "2 * save * between", "the derivative is zero where interval² = 2 "
                "· save · between: take the root"),
        Mistake("restarts are free", LOST, "save / interval + interval / 2 / between",
                "each failure costs the restart too, from the failure to the next step"),
        Mistake("the whole interval in the share", LOST, "save / interval + (interval + restart) / between",
                "a failure costs half an interval on average, not a whole one"),
        Mistake("saving is free", LOST, "(interval / 2 + restart) / between",
                "each interval costs one save too: save / interval"),
        Mistake("the share of one node", LOST, "save / interval + (interval / 2 + restart) / mtbf",
                "this counts the failures of one node: the job has one every mtbf / nodes seconds"),
        Mistake("hours", "return interval, ", "return interval / 3600, ", "return the interval in seconds, like the arguments"),
        Mistake("swapped", "return interval, " + LOST, f"return {LOST}, interval",
                "the two are exchanged: return the seconds first, then the fraction"),
        Mistake("percent", LOST, f"100 * ({LOST})", "return a fraction between 0 and 1, not percent"),
    ),
}
