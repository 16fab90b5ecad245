"""Asks a server at a socket for pages, by four connections, and says a digest of them: pages.py SOCKET MIB PAGES TURN."""

import hashlib
import http.client
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

path, mib, pages, turn = sys.argv[1], *map(int, sys.argv[2:])


class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)


def ask(page):
    connection = Connection("localhost")
    connection.request("GET", "/?mib=%d&page=%d" % (mib, page))
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, (response.status, body)
    connection.close()
    return body


digest = hashlib.sha256()
with ThreadPoolExecutor(4) as some:
    for body in some.map(ask, range(turn * pages, (turn + 1) * pages)):
        digest.update(body)
print(digest.hexdigest()[:16])
