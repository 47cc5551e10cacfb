"""A scheduler extender over HTTP that wants no pod on the nodes it is told."""

import http.server
import json
import sys

PORT, REFUSED = int(sys.argv[1]), sys.argv[2:]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        names = arguments["NodeNames"]
        result = {
            "NodeNames": [name for name in names if name not in REFUSED],
            "FailedNodes": {name: "the extender wants no pod here" for name in names if name in REFUSED},
        }
        body = json.dumps(result).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", PORT), Handler)
print("serving", flush=True)
server.serve_forever()
