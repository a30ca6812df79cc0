"""Known wrong answers of lesson 18's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

POSITION = "job.restore(data[48:], int.from_bytes(data[40:48], \"big\"))"
RIGHT = "right = not name.endswith(\".partial\") and hashlib.sha256(data[32:]).digest() == data[:32]"
DUE = "(done - saved >= job.every or done == job.last)"
CATCH = "        except OSError:\n            disk.remove(f\"{name}.partial\")\n            return False\n"
OLD = "        for old in disk.names()[:-2]:\n            disk.remove(old)\n"
WRITE = "            disk.write(f\"{name}.partial\", hashlib.sha256(data).digest() + data)\n"
END = "    if saved < done:\n        save(done)\n"
HEAR = "        nonlocal asked\n        asked = True\n"
SAFE = ("a power cut can take away what was not flushed, the new name and the bytes, in any order. Flush the file, rename it, "
        "flush the root folder; only then remove an older checkpoint")

MISTAKES = {
    "survive": (
        Mistake("the position is forgotten", POSITION, "job.restore(data[48:], 0)",
                "a new process reads from the first sample on, unless the checkpoint says how many were read: save "
                "`job.position` too"),
        Mistake("the position is the step", POSITION, "job.restore(data[48:], int.from_bytes(data[32:40], \"big\"))",
                "a step reads several samples, and not always as many: save `job.position` itself"),
        Mistake("no checksum", "hashlib.sha256(data[32:]).digest() == data[:32]",
                "len(data) == 48 + len(job.state())",
                "a file can have another bit than was written, and look whole. Store a checksum with it, and compare"),
        Mistake("no look at the bytes", RIGHT, "right = not name.endswith(\".partial\") and bool(data)",
                "a file can be cut off where the process or the power ended: store a checksum with it, and compare",
                stops="ValueError"),
        Mistake("one step too few", "    while done < job.last and not asked:", "    while done < job.last - 1 and not asked:",
                "the last step is `job.last`, and it counts"),
        Mistake("a step is left out after a restart", "    done = saved = load()\n",
                "    done = saved = load()\n    done += done > 0\n",
                "the checkpoint's step is done, and the next one is not: go on with the step after it"),
        Mistake("always 0", "return 0 if done == job.last else 75", "return 0",
                "75 says that the run can go on: return it if step `job.last` is not done"),
        Mistake("75 after a signal", "return 0 if done == job.last else 75", "return 75 if asked else 0",
                "if step `job.last` is done, the run is done, even if a signal came"),
        Mistake("nobody listens", "    signal.signal(signal.SIGUSR1, hear)\n", "",
                "nobody listens for SIGUSR1, so it ends the process at once: `signal.signal(signal.SIGUSR1, handler)`"),
        Mistake("it listens after loading", "    signal.signal(signal.SIGUSR1, hear)\n    done = saved = load()\n",
                "    done = saved = load()\n    signal.signal(signal.SIGUSR1, hear)\n",
                "a signal can come while it loads: listen before you look at the disk"),
        Mistake("a full disk ends the run", CATCH, "        finally:\n            pass\n",
                "`write` raises an OSError where the disk is full. A training can go on without this checkpoint: catch it, "
                "remove the half file, and save after the next step"),
        Mistake("the handler ends the process", HEAR, "        raise SystemExit(75)\n",
                "a handler that raises leaves a step or a save half done: let it set a flag, and look at the flag between two "
                "steps", by=("again",)),
        Mistake("a checkpoint after each step", DUE, "True",
                "a checkpoint costs time, too: write one when `job.every` steps have passed, at the end, and after a signal",
                by=("writes",)),
        Mistake("another step after the signal", "not asked:\n        job.step(done + 1)\n        done += 1\n",
                "not asked:\n        job.step(done + 1)\n        done += 1\n        if asked and done < job.last:\n"
                "            job.step(done + 1)\n            done += 1\n",
                "two seconds after the signal the process ends: leave the loop at once, and save", by=("again",)),
        Mistake("no save at the signal", END, "",
                "at a signal the steps since the last checkpoint would be lost: save before you return", by=("again",)),
        Mistake("half as many checkpoints", "done - saved >= job.every", "done - saved >= 2 * job.every",
                "a kill takes the steps since the last checkpoint: save when `job.every` steps have passed", by=("again",)),
        Mistake("the bytes are not flushed", "        disk.flush(f\"{name}.partial\")\n", "", SAFE, by=("again",)),
        Mistake("the name is not flushed", "        disk.flush()\n", "", SAFE, by=("again",)),
        Mistake("the old ones go first", WRITE, "            [disk.remove(old) for old in disk.names()]\n" + WRITE, SAFE,
                by=("again",)),
        Mistake("only the newest stays", "disk.names()[:-2]", "disk.names()[:-1]",
                "the newest file can be damaged, and then an older one is needed: keep two", by=("again",)),
        Mistake("the next save is the next due one", DUE, "(done % job.every == 0 or done == job.last)",
                "where the disk was full, save after the next step, not when the next checkpoint is due", by=("again",)),
        Mistake("what a killed process left stays",
                "            if not right or len(whole) == 2:\n                disk.remove(name)\n",
                "            if not right:\n",
                "a process that was killed can leave a half file, or a third checkpoint. Nobody removes them later: do it while "
                "you load", by=("most",)),
        Mistake("all stay", OLD, "", "checkpoints pile up: remove all but the newest two once a new one is safe",
                by=("left", "most")),
    ),
}
