"""EmbeddingQueue: turns of calls, failures, cancelled calls, the end."""

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from paceline.embedding.queue import EmbeddingQueue, QueueClosedError
from paceline.errors import BackendError


class CountingEmbedder:
    """A text's vector is its first token; a batch holds two. It waits for `gate`."""

    def __init__(self):
        self.gate = threading.Event()
        self.batches = []
        self.is_closed = False

    def fits(self, lengths):
        return len(lengths) <= 2

    def embed_batch(self, texts):
        self.gate.wait(5)
        self.batches.append([text[0] for text in texts])
        if 13 in self.batches[-1]:
            raise BackendError("thirteen")
        return np.array([[text[0]] for text in texts], np.float32)

    def close(self):
        self.is_closed = True


@pytest.fixture
def embedder():
    return CountingEmbedder()


@pytest.fixture
def queue(embedder):
    queue = EmbeddingQueue(lambda: embedder, dim=1)
    yield queue
    embedder.gate.set()
    queue.close()


def test_calls_take_turns_text_by_text(queue, embedder):
    long = queue.submit([[i] for i in range(1, 7)])
    while queue.num_tokens == 6:  # until the first step is taken
        pass
    short = queue.submit([[10]])
    embedder.gate.set()
    assert short.result(5).tolist() == [[10]]
    assert long.result(5).ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert embedder.batches[0] == [1]
    assert 10 in embedder.batches[1]


def test_a_failed_step_ends_its_calls_and_no_other(queue, embedder):
    bad = queue.submit([[5], [13], [6]])
    while queue.num_tokens == 3:
        pass
    beside, later = queue.submit([[7]]), queue.submit([[8]])
    embedder.gate.set()
    for failed in (bad, beside):
        with pytest.raises(BackendError, match="thirteen"):
            failed.result(5)
    assert later.result(5).tolist() == [[8]]
    assert embedder.batches == [[5], [13, 7], [8]]


def test_a_cancelled_call_takes_its_texts_with_it(queue, embedder):
    first = queue.submit([[1]])
    while queue.num_tokens:
        pass
    gone = queue.submit([[2]] * 100)
    assert queue.num_tokens == 100
    gone.cancel()
    assert queue.num_tokens == 0
    embedder.gate.set()
    assert first.result(5).tolist() == [[1]]
    assert queue.submit([[3]]).result(5).tolist() == [[3]]
    assert sum(batch.count(2) for batch in embedder.batches) == 0
    with pytest.raises(CancelledError):
        gone.result(5)


def test_closing_fails_what_waits_and_frees_the_embedder(queue, embedder):
    queue.submit([[1]])
    while queue.num_tokens:
        pass
    waiting = queue.submit([[2]])
    closer = threading.Thread(target=queue.close)
    closer.start()
    while not queue._is_closing:
        pass
    embedder.gate.set()
    closer.join(5)
    with pytest.raises(QueueClosedError, match="shutting down"):
        waiting.result(5)
    assert embedder.is_closed
    with pytest.raises(QueueClosedError, match="shutting down"):
        queue.submit([[3]])


def test_it_says_how_long_the_queue_will_take_once_it_knows(queue, embedder):
    assert queue.predict_s() is None
    embedder.gate.set()
    queue.submit([[1]]).result(5)
    assert queue.predict_s() == 0


def test_an_embedder_that_does_not_open_fails_the_call():
    def fail():
        raise BackendError("no memory")

    queue = EmbeddingQueue(fail, dim=1)
    with pytest.raises(BackendError, match="no memory"):
        queue.submit([[1]]).result(5)
    queue.close()
