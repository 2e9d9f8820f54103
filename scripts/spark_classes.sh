# Sourced by `scripts/test`: what Java loads of Spark, kept ready in .venv. A session starts in two thirds of the time.

# Prints the option of Java that takes it from there; nothing where there is no Java, or it could not be kept.
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
    local program
    program="$(mktemp --suffix=.py)"
    cat >"$program" <<'EOT'
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
rows = spark.createDataFrame([(n, str(n)) for n in range(9)], "a long, b string")
rows.groupBy("b").count().join(rows, "b").orderBy("a").collect()
spark.stop()
EOT
    SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit=$1.new" \
        timeout 600 spark-submit --master "local[1]" --conf spark.ui.enabled=false \
        --conf spark.driver.host=127.0.0.1 "$program" >/dev/null 2>&1
    rm -f "$program"
    mv "$1.new" "$1"
}
