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
                "nobody listens for USR1, whose default is to end the process at once: signal.signal(signal.SIGUSR1, ...) "
                "first of all"),
        Mistake("listens after loading", "    signal.signal(signal.SIGUSR1, hear)\n    done = saved = load()\n",
                "    done = saved = load()\n    signal.signal(signal.SIGUSR1, hear)\n",
                "a signal may come while the checkpoint is loaded: begin to listen before"),
        Mistake("saves in the handler", HANDLER, HANDLER + "        save(done)\n",
                "the handler saves, in the middle of whatever the loop is at, a half-made step or another checkpoint: let it "
                "do no more than set a flag"),
        Mistake("leaves from the handler", HANDLER, HANDLER + "        raise SystemExit(75)\n",
                "the handler ends the process in the middle of a step or a save, and what was done since the newest checkpoint "
                "is lost: let it set a flag, and finish the step"),
        Mistake("stops without saving", STOP, STOP.replace("saved < done", "saved < done == last"),
                "it stops without saving, and the steps since the newest checkpoint are done again: save before you return"),
        Mistake("looks only when a checkpoint is due", LOOP, "    while done < last and not (asked and done == saved):\n",
                "it stops at the next regular checkpoint, for which the time may not be enough: look after every step, and "
                "save there"),
        Mistake("never stops", LOOP, "    while done < last:\n",
                "it hears the signal and goes on to the end: look at the flag after every step, and if the handler sets a "
                "variable of `go_on`, say `nonlocal` in it"),
        Mistake("from the start", "done = saved = load()", "done = saved = load() * 0",
                "load() says which step the checkpoint is of, and it begins with step 1 all the same: go on with the next one"),
        Mistake("the checkpoint's step again", LOOP, "    done = max(0, done - 1)\n" + LOOP,
                "the step that the checkpoint is of has been done: go on with the next one, load() + 1"),
        Mistake("saves every step", "        if done % every == 0:\n", "        if True:\n",
                "it saves after every step, which costs more than training: every `every` steps, and when it stops"),
        Mistake("saves twice", STOP, "    save(done)\n",
                "it may write a checkpoint that is there already: after a signal while it was saving, or while it loaded"),
        Mistake("always done", STATUS, "    return 0\n",
                "it says 0 when it was stopped, too, and nobody puts the job back into the queue: 75 unless step `last` is done"),
        Mistake("never done", STATUS, "    return 75 if asked else 0\n",
                "after a signal in the last step it says 75, and the job goes back into the queue for nothing: 0 when step "
                "`last` is done"),
    ),
    "checkpoint-interval": (
        Mistake("one node's failures", "mtbf / nodes", "mtbf", "the job stops when any of its nodes fails: so many times as "
                "often as one"),
        Mistake("more nodes fail less", "mtbf / nodes", "mtbf * nodes",
                "more nodes fail more often, not less: the time between failures of the job is mtbf / nodes"),
        Mistake("a whole interval is lost", "math.sqrt(2 * save * between)", "math.sqrt(save * between)",
                "a failure comes in the middle of an interval on average, so half of it is lost: with interval / 2 the minimum "
                "has a 2 under the root"),
        Mistake("no root", "math.sqrt(2 * save * between)", "2 * save * between", "the derivative is zero where interval² = 2 "
                "· save · between: take the root"),
        Mistake("restarts are free", LOST, "save / interval + interval / 2 / between",
                "each failure costs the restart, too, from the failure to the next step"),
        Mistake("the whole interval in the share", LOST, "save / interval + (interval + restart) / between",
                "a failure costs half an interval on average, not a whole one"),
        Mistake("saving is free", LOST, "(interval / 2 + restart) / between",
                "each interval costs one save, too: save / interval"),
        Mistake("the share of one node", LOST, "save / interval + (interval / 2 + restart) / mtbf",
                "the share counts the failures of one node: of the job there is one every mtbf / nodes seconds"),
        Mistake("hours", "return interval, ", "return interval / 3600, ", "the interval is to be in seconds, as what you are "
                "given"),
        Mistake("swapped", "return interval, " + LOST, f"return {LOST}, interval",
                "the two have changed places: first the seconds, then the share"),
        Mistake("percent", LOST, f"100 * ({LOST})", "the share is to be between 0 and 1, not in percent"),
    ),
}
