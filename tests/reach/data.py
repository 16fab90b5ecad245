"""Data as a program has them, in MIB megabytes: columns of numbers, texts and records. On each line "work" looks at all of it, changes a little,
and says a digest and how many milliseconds that took. With WORKERS it forks so many, and they work."""

import array
import hashlib
import os
import sys
import time

MIB = int(sys.argv[1])
WORKERS = int(sys.argv[2])


def build():
    line = b"%08d the same words in each process, as from one file on disk; " * 16
    texts = [line % tuple([number] * 16) for number in range(MIB * 128)]
    records = [{"id": number, "name": "name %d" % number, "tags": [number, number + 1]} for number in range(MIB * 250)]
    columns = [array.array("d", range(number, number + 131072)) for number in range(MIB // 2)]
    return texts, records, columns, bytearray(os.urandom(1) * 4096)


def work(texts, records, columns, mine, turn):
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    for column in columns:
        digest.update(column)
    # Counts of references are written by this.
    total = sum(record["id"] * record["tags"][1] + len(record["name"]) for record in records)
    records[turn % len(records)]["id"] = turn
    mine[turn % 4096] ^= 1
    return "%s-%d" % (digest.hexdigest()[:16], total)


def serve(read, say, data):
    for turn, line in enumerate(read):
        if line.strip() != "work":
            break
        begun = time.monotonic()
        answer = work(*data, turn)
        say("%s %d" % (answer, (time.monotonic() - begun) * 1000))


def say(text):
    print(text, flush=True)


def fork(data):
    """Children that a line is passed on to; what they say is one answer."""
    children = []
    for _ in range(WORKERS):
        to_child, to_parent = os.pipe(), os.pipe()
        if os.fork() == 0:
            for end in [to_child[1], to_parent[0]] + [end for ends in children for end in ends]:
                os.close(end)
            with os.fdopen(to_child[0]) as read, os.fdopen(to_parent[1], "w", buffering=1) as out:
                work(*data, 0)
                out.write("ready\n")
                serve(read, lambda text: out.write(text + "\n"), data)
            os._exit(0)
        os.close(to_child[0])
        os.close(to_parent[1])
        children.append((to_child[1], to_parent[0]))
    return [(os.fdopen(write, "w", buffering=1), os.fdopen(read)) for write, read in children]


data = build()
if WORKERS == 0:
    say("ready")
    serve(sys.stdin, say, data)
else:
    children = fork(data)
    for _, read in children:
        assert read.readline() == "ready\n"
    say("ready")
    for line in sys.stdin:
        for write, _ in children:
            write.write(line)
        answers = [read.readline().split() for _, read in children]
        say("%s %d" % ("-".join(answer for answer, _ in answers), sum(int(ms) for _, ms in answers)))
    for write, _ in children:
        write.close()
    for _ in children:
        os.wait()
