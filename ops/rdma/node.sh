# The first of two virtual machines: a whole cluster. Does to its node what the other machine asks for over a socket, one word at a
# time; whoever is heard again knows that it is done.
node() {
    ballast transfer-worker --nats nats://127.0.0.1:4222 --name node-1 --memory 300MiB --memory-dir /dev/shm/node \
        --cold /root/cold --listen "$LAB_ip:7000" >> node.log 2>&1 &
    node=$!
}

mkdir -p nats cold
sed "s#\(store_dir:\).*#\1 \"/root/nats\"#" /usr/bin/nats.conf > nats.conf
BALLAST_NATS_NAME=nats nats-server -c nats.conf > nats.log 2>&1 &
ballast gateway --nats nats://127.0.0.1:4222 --log-size 128MiB > gateway.log 2>&1 &
ballast workflow-worker --nats nats://127.0.0.1:4222 > workflow.log 2>&1 &
node

while :; do
    word=$(nc -l -p 9999 < /dev/null)
    echo "asked to: $word"
    case $word in
        pause) kill -STOP $node ;;
        resume) kill -CONT $node ;;
        kill) kill -9 $node; wait $node 2> /dev/null ;;
        start) node ;;
        change)
            # One byte of every segment in memory.
            for segment in /dev/shm/node/instances/*/segment-*; do
                printf 'X' | dd of="$segment" bs=1 seek=12345 conv=notrunc 2> /dev/null
            done ;;
        fail) tail -n 8 ./*.log; exit 1 ;;
        end) break ;;
    esac
done
grep -h "ready:" -A4 node.log
exit 0
