"""What the judging process makes of a transcript, whoever wrote it."""

import pytest
import torch

from course.lab.checks import check, transcript
from course.lab.checks.exercise import find
from course.lab.exercises import lesson16_checkpoints, lesson18_fault_tolerance


def test_a_transcript_comes_back_as_it_was():
    events = [["born"], ["step", 2**61 - 1], ["write", "ä/b", -1]]
    assert transcript.unpack(transcript.pack(events)) == events


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8),
                                   torch.full((4,), 255, dtype=torch.uint8), torch.full((200_000,), ord("["), dtype=torch.uint8),
                                   torch.full((transcript.MAX_BYTES + 1,), ord("1"), dtype=torch.uint8),
                                   transcript.pack([])[:1],
                                   torch.tensor(list(b'{"a": 1}'), dtype=torch.uint8)])
@pytest.mark.parametrize("name", ["publish", "go-on"])
def test_what_is_no_transcript_of_the_exercise_is_an_error_of_the_answer(name, value):
    exercise, key = find(name), {"publish": "noted", "go-on": "events"}[name]
    run = check.with_weighed_outputs(exercise, exercise.draw(3, True), check.Run(({key: value},)))
    assert run.error == run.hidden_error and not run.outputs and "cannot be read" in run.error
    assert check.with_weighed_outputs(exercise, exercise.draw(3, True), check.Run(({"other": value},))).error


DEEP = "/".join(50_000 * "a")


@pytest.mark.parametrize("event", [["write", 3, 0], ["write", "a"], ["rename", "a", "b"], ["remove"], ["explode", "a"], [], 7,
                                   "write", ["flush", DEEP], ["write", DEEP, 0]])
def test_operations_that_no_disk_did_are_refused(event):
    inputs = lesson16_checkpoints.draw_files(3, True)
    with pytest.raises(Exception):                   # noqa: B017  of whatever kind: `check.weighed` catches all
        lesson16_checkpoints.weigh_publish(inputs, {"noted": transcript.pack([event])})


def quiet(training):
    """The events of a training that nothing befalls, states and all."""
    state, every, last, _ = training
    events = [["born"], ["load", 0], ["done", state]]
    for number in range(1, last + 1):
        state = lesson18_fault_tolerance.next_state(state, number)
        events += [["step", number], ["done", state]]
        events += [["save", number], ["done", state]] if number % every == 0 or number == last else []
    return [*events, ["returned", 0]]


def counted(inputs, events):
    return lesson18_fault_tolerance.weigh_go_on(inputs, {"events": transcript.pack(events)})


def test_a_training_that_nothing_befell_is_right_in_the_first_fate_alone():
    """Who leaves out what befell, or puts another process between two steps, is found out; so are the states of another seed."""
    inputs, other = (lesson18_fault_tolerance.draw_fates(seed, True) for seed in (3, 4))
    trainings, events = lesson18_fault_tolerance.trainings(inputs), lesson18_fault_tolerance.run_go_on(inputs)
    happened = transcript.unpack(events["events"])
    found = lesson18_fault_tolerance.weigh_go_on(inputs, events)
    assert happened[0] == quiet(trainings[0]) and found["losses"].unique().numel() == 1
    assert not any(found[name].any() for name in ("again", "late", "needless", "torn", "status"))
    for fate in range(1, len(trainings)):
        with pytest.raises(ValueError):
            counted(inputs, [*happened[:fate], quiet(trainings[fate]), *happened[fate + 1:]])
        born = [*happened[fate][:3], ["born"], *happened[fate][3:]]
        with pytest.raises(ValueError):
            counted(inputs, [*happened[:fate], born, *happened[fate + 1:]])
    with pytest.raises(ValueError):
        lesson18_fault_tolerance.weigh_go_on(inputs, lesson18_fault_tolerance.run_go_on(other))
    unended = [events[:-1] for events in happened]
    assert counted(inputs, unended)["status"].all()


@pytest.mark.parametrize("name", ["publish", "go-on"])
def test_a_transcript_made_at_home_is_right_on_its_own_seed_alone(name):
    exercise = find(name)
    home, hidden = exercise.draw(3, True), exercise.draw(2**100 + 4, True)
    made, wanted = exercise.program(home), exercise.weighed(hidden, exercise.program(hidden))
    own, other = (check.with_weighed_outputs(exercise, inputs, check.Run((made,))) for inputs in (home, hidden))
    assert own.outputs and not own.error
    assert other.error or any(check.difference(wanted[key], other.outputs[0][key], exercise.tolerance) for key in exercise.claims)
