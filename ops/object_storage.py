"""An S3-speaking server for tests: moto, in this process, on a port of its own. It can be told to answer 503 now and then."""

import itertools
import logging
import threading

import boto3
from botocore.config import Config
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

BUCKET = "weights"
SECRET = "kept-out-of-every-log"


class ObjectStorage:
    """A server with one bucket, and what a worker's environment must say to reach it."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._requests = itertools.count(1)
        self.refuse_every = None
        self.refused = 0
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.env = {
            "AWS_ACCESS_KEY_ID": "ballast", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        threading.Thread(target=self._server.serve_forever, name="object-storage", daemon=True).start()
        self.client = boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id="ballast", aws_secret_access_key=SECRET, region_name="us-east-1",
            config=Config(retries={"max_attempts": 10}))
        self.client.create_bucket(Bucket=BUCKET)

    def _answer(self, environ, start_response):
        if self.refuse_every and next(self._requests) % self.refuse_every == 0:
            self.refused += 1
            # What was sent is read, so that the connection stays in order.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return Response("<Error><Code>SlowDown</Code></Error>", 503, mimetype="application/xml")(environ, start_response)
        return self._app(environ, start_response)

    def url(self, prefix):
        return f"s3://{BUCKET}/{prefix}"

    def keys(self, prefix, part=""):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        return [found["Key"] for page in pages for found in page.get("Contents", []) if part in found["Key"]]

    def get(self, key):
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key, content):
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key):
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def open_uploads(self, prefix):
        found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/").get("Uploads", [])
        return [upload["Key"] for upload in found if upload["Key"].startswith(f"{prefix}/")]

    def close(self):
        self._server.shutdown()
