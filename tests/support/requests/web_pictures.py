"""A web server of picture files on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class WebPictures:
    """Serves the files that it is given. A context manager that stops it. Counts the requests."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.num_fetches = 0
        self._files: dict[str, bytes] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.num_fetches += 1
                content = web._files[self.path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._url = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url_of(self, content: bytes) -> str:
        """Serve a file under a new path and return its URL."""
        path = f"/{len(self._files)}.png"
        self._files[path] = content
        return f"{self._url}{path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
