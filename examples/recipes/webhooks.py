"""Webhooks: each event is posted to a URL until it is accepted, and in order for each host.

`send` arms a timer that is due at once, so an event is not lost once `send` has returned. Worker
processes are members of one consumer group, which leases each event to one of them. The group gets
the timers that fire after its creation, so senders call `open_group` first.

* An answer 2xx ends the job. After 408, 429, 5xx or no answer the daemon repeats the attempt later:
  after Retry-After, else after a random delay whose limit doubles with each failure.
* Any other answer, and the last failed attempt, make a dead letter. `purgatoryd dead ls webhooks`
  shows the errors, and `purgatoryd dead requeue` repeats the attempts.
* The order key is the host. A host that fails delays its own events only, and has one request at a
  time. After a dead letter its next event follows.
* An event is posted again if a worker is killed between the answer and the ack. All requests of an
  event have the same Webhook-Id, so the receiver can drop the second one.

    python -m examples.recipes.webhooks DAEMON [BACKOFF_SECONDS]
"""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from purgatoryd.clients import Client, Consumer, Job

NAMESPACE = "webhooks"
GROUP = "webhooks"
TOPIC = "events"
BACKOFF_S, BACKOFF_CAP_S, ATTEMPTS = 1.0, 600.0, 12
REQUEST_S = 10.0
TIMEOUT_S = 60.0
REPEATED = {408, 429, *range(500, 600)}
"""Answers after which a request is repeated."""


def open_group(timers: Client, backoff_s: float = BACKOFF_S) -> None:
    """Create the consumer group, unless it exists."""
    timers.create_group(
        GROUP, [TOPIC], ordered=True, on_dead="skip", max_attempts=ATTEMPTS, backoff=backoff_s,
        backoff_cap=BACKOFF_CAP_S,
    )  # fmt: skip


def send(timers: Client, event: str, url: str, body: object) -> None:
    """Let the workers post `body` as JSON to `url`. `event`: id of the event, up to 255 bytes."""
    payload = json.dumps({"url": url, "body": body}).encode()
    timers.add(event, 0, topic=TOPIC, payload=payload, mode="keep", order_key=urlsplit(url).netloc)


def post(event: str, url: str, body: object) -> tuple[int, float | None]:
    """Post an event. Return the status, 0 without an answer, and the seconds of Retry-After."""
    headers = {"content-type": "application/json", "webhook-id": event}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        wait = error.headers.get("retry-after", "")
        return error.code, float(wait) if wait.isdecimal() else None
    except (OSError, HTTPException):
        return 0, None


def deliver(job: Job) -> None:
    """Post the event of a job, and answer the job."""
    event = json.loads(job.payload)
    status, wait_s = post(str(job.key), event["url"], event["body"])
    if 200 <= status < 300:
        job.ack()
    elif status in REPEATED or status == 0:
        job.nack(f"status {status}", delay=wait_s)
    else:
        job.reject(f"status {status}")


def work(daemon: str, backoff_s: float = BACKOFF_S) -> None:
    """Deliver events until SIGTERM."""
    with Client(daemon, namespace=NAMESPACE, timeout=TIMEOUT_S) as timers:
        open_group(timers, backoff_s)
    with Consumer(
        daemon, namespace=NAMESPACE, group=GROUP, create=False, timeout=TIMEOUT_S
    ) as jobs:
        signal.signal(signal.SIGTERM, lambda *_: jobs.stop())
        jobs.run(deliver, concurrency=8)


if __name__ == "__main__":
    work(sys.argv[1], *map(float, sys.argv[2:]))
