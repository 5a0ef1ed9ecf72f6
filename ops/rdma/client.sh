# The second of two virtual machines: a client on another host, with one managed put, get, migrate, get over RDMA, and with a node
# that is killed, paused, or holds a byte that changed. Never may a read succeed with other bytes than those that were put.
export BALLAST_NATS=nats://$LAB_peer:4222
b() { ballast --nats "$BALLAST_NATS" "$@"; }
fail() {
    echo "FAILED: $*"
    echo fail | nc "$LAB_peer" 9999
    exit 1
}
step() { echo "-- $* ($(cut -d' ' -f1 /proc/uptime) s)"; }
tell() {
    turns=0
    until echo "$1" | nc "$LAB_peer" 9999 2> /dev/null; do
        turns=$((turns + 1))
        [ $turns -lt 300 ] || { echo "FAILED: the other machine does not listen"; exit 1; }
        sleep 0.2
    done
}
await() { # COMMAND...   until it succeeds
    turns=0
    until "$@" > await.log 2>&1; do
        turns=$((turns + 1))
        [ $turns -lt 20 ] || { cat await.log; fail "$*: not in time"; }
        sleep 1
    done
}
field() { tr -d ' \n' < "$2" | sed -n "s/.*\"$1\":\"\{0,1\}\([^\",}]*\).*/\1/p"; }
expect() { # FIELD WANTED FILE
    [ "$(field "$1" "$3")" = "$2" ] || { cat "$3"; fail "$1 is $(field "$1" "$3"), expected $2"; }
}
number() { # VALUE   as eight bytes, little-endian
    value=$1
    for _ in 1 2 3 4 5 6 7 8; do
        printf "\\$(printf %03o $((value % 256)))"
        value=$((value / 256))
    done
}
model() { # FILE TENSORS BYTES   a safetensors file of random bytes
    header= offset=0
    for tensor in $(seq "$2"); do
        header="$header,\"t$tensor\":{\"dtype\":\"U8\",\"shape\":[$3],\"data_offsets\":[$offset,$((offset + $3))]}"
        offset=$((offset + $3))
    done
    header="{${header#,}}"
    { number ${#header}; printf %s "$header"; head -c $offset /dev/urandom; } > "$1"
}
get() { # NAME LOG
    rm -rf out
    b -o json get "$1" --to out > "$2" 2> "$2.err"
}
same() { cmp model.safetensors out/model.safetensors || fail "other bytes than those that were put: $1"; }
ready() { b -o json status | grep -q '"node-1"'; }

model model.safetensors 23 2100007
await ready

step "put: the bytes are written over RDMA"
b -o json put model.safetensors lab --preferred hot --mode manual > put.log || fail "put"
expect transport rdma put.log
step "get: the bytes are read over RDMA"
get lab get.log || { cat get.log.err; fail "get"; }
expect transport rdma get.log
expect cold_bytes 0 get.log
same "after put"

step "migrate to COLD, get: from disk, over TCP"
b migrate lab cold --wait > migrate.log 2>&1 || { cat migrate.log; fail "migrate to cold"; }
get lab get.log || { cat get.log.err; fail "get from disk"; }
expect hot_bytes 0 get.log
expect transport tcp get.log
same "from disk"
step "migrate to HOT, get: over RDMA again"
b migrate lab hot --wait > migrate.log 2>&1 || { cat migrate.log; fail "migrate to hot"; }
get lab get.log || { cat get.log.err; fail "get after migrate"; }
expect transport rdma get.log
expect cold_bytes 0 get.log
same "after migrate"

step "the node is killed in the middle of a get and comes back"
get lab get.log & reader=$!
sleep 0.7
tell kill
tell start
wait $reader || { cat get.log.err; fail "a get did not outlive its node's restart"; }
same "after the node was killed"
echo "   it came over $(field transport get.log)"
step "the node is paused in the middle of a get"
await ready
get lab get.log & reader=$!
sleep 0.7
tell pause
sleep 3
tell resume
wait $reader || { cat get.log.err; fail "a get did not outlive a pause"; }
same "after a pause"

step "a byte changes in the node's memory"
tell change
tell ping
if get lab get.log; then
    same "although a byte changed in memory"
    echo "   another copy was read"
else
    grep -q CHECKSUM_MISMATCH get.log.err || { cat get.log.err; fail "a changed byte is refused as something else"; }
fi
tell end
echo "all as it should be"
