"""A webhook over TLS that answers TokenReviews, SubjectAccessReviews and ImageReviews.

Arguments: certificate, key, port, and a file to which each review is added as a line.
"""

import http.server
import json
import ssl
import sys

certificate, key, port, log = sys.argv[1:]


def status_of(review):
    spec = review["spec"]
    if review["kind"] == "TokenReview":
        if spec["token"] == "webhook-token":
            return {"authenticated": True, "user": {"username": "jane", "groups": ["devs"]}}
        return {"authenticated": False}
    if review["kind"] == "ImageReview":
        images = [container["image"] for container in spec["containers"]]
        allowed = not any("bad" in image for image in images)
        return {"allowed": allowed, "reason": "" if allowed else "the image is bad"}
    attributes = spec.get("resourceAttributes", {})
    allowed = spec.get("user") == "jane" and attributes.get("verb") in ("list", "create", "get")
    return {"allowed": allowed, "reason": "the webhook says so"}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        review = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = self.headers.get("authorization") == "Bearer the-server" and self.path == "/review"
        with open(log, "a") as file:
            file.write(json.dumps(review) + "\n")
        review["status"] = status_of(review)
        body = json.dumps(review).encode()
        self.send_response(200 if known else 403)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
print("serving", flush=True)
server.serve_forever()
