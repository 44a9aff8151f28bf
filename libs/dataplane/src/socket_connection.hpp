// One connection of the server: reads a request, runs it, answers, and so on until the peer leaves or misbehaves.
#pragma once

#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "descriptors.hpp"
#include "queue.hpp"
#include "requests.hpp"

namespace treadle::dataplane {

struct SocketLimits {
    int connections_max = 64;
    uint64_t reply_bytes_max = uint64_t{1} << 30;  // of all replies in the works together
    int64_t idle_ns = int64_t{600} * 1'000'000'000;
    int64_t stall_ns = int64_t{5} * 1'000'000'000;  // a peer that neither sends nor reads for so long within a message is cut
    int64_t greet_ns = int64_t{2} * 1'000'000'000;  // the header of the first request is there by then
};

// Connections beside `connections_max` whose peer has not yet sent a request with a token that is known here.
inline constexpr int STRANGERS_MAX = 16;
inline constexpr int64_t STRANGER_NS = 100'000'000;  // of silence; then a stranger yields to a newcomer where all these places are taken
inline constexpr uint64_t LEAST_BYTES_PER_SECOND = 16u << 20;  // a peer that takes a reply more slowly, beyond one stall, is cut

struct SocketCounters {
    std::atomic<uint64_t> connections_total{0}, cut_total{0}, requests_total{0}, refused_total{0}, rows_total{0}, bytes_total{0};
    std::atomic<int64_t> connections{0};
};

// What the connections of one server share.
struct SocketShared {
    Queue& queue;
    const int64_t piece_rows;
    const std::shared_ptr<Versions> versions;
    const SocketLimits limits;
    SocketCounters counters;
    std::atomic<uint64_t> reply_bytes{0};
    std::atomic<bool> draining{false};
    std::atomic<int> known{0};  // connections whose peer is no stranger
    Wakeup news{};              // for who accepts: a place has become free
};

class SocketConnection {
public:
    SocketConnection(SocketShared& shared, Descriptor fd) : shared_(shared), fd_(std::move(fd)) {}

    // Returns when the connection is over and holds nothing any more. Memory is the only thing that may run out here; then the
    // peer is cut.
    void run() noexcept {
        try {
            while (serve_one()) {}
        } catch (const std::exception&) {
            ++shared_.counters.cut_total;
        }
        if (known_) --shared_.known;
        body_.reset(), reply_.reset();
        std::lock_guard lock(closing_);
        fd_ = Descriptor();
    }

    // From another thread: whatever waits for the peer ends.
    void cut() noexcept {
        std::lock_guard lock(closing_);
        if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);
    }

    // From the thread that accepts: a stranger's place is wanted.
    void yield() noexcept {
        std::lock_guard lock(closing_);
        yields_ = true;
        if (fd_) ::shutdown(fd_.get(), SHUT_RD);
    }

    bool takes_strangers_place() const noexcept { return !known_ && !yields_; }
    int64_t since_ns() const noexcept { return since_ns_; }

private:
    static constexpr uint64_t KEPT_BYTES = 8u << 20;      // buffers up to here stay for the next request
    static constexpr uint64_t GROWTH_BYTES = 1u << 20;    // memory for a body follows what has come, not what was announced
    static constexpr int64_t RETRY_NS = 5'000'000;        // when the replies of others have gone
    static constexpr int64_t FULL_NS = 100'000'000;       // when a connection is likely to have gone
    static constexpr int64_t LINGER_NS = 500'000'000;     // how long a peer that is sent away may take to read why
    static constexpr uint64_t LINGER_BYTES = 1u << 20;    // of what it sends meanwhile

    bool serve_one() {
        FrameHeader header;
        if (!read_header(header)) return false;
        const int64_t received_ns = now_ns();
        if (!is_frame(header) || header.body_bytes > BODY_BYTES_MAX)  // nobody knows where the next frame begins
            return send_away(header.request, Fault::invalid, "not a frame of this protocol, or one too long");
        const int32_t tenant = shared_.queue.tenants().find(header.token);
        if (tenant < 0 && !known_) return send_away(header.request, Fault::forbidden, STRANGE);
        if (tenant < 0) return skip_body(header.body_bytes) && refuse(header.request, Fault::forbidden, STRANGE);  // others share the connection
        if (!known_ && !enter())
            return send_away(header.request, Fault::refused,
                             "all " + std::to_string(shared_.limits.connections_max) + " connections of this door are taken, the limit "
                             "socket_connections_max: close some, raise it, or try again in 0.1 s", {Fault::refused, 0, FULL_NS});
        if (!read_body(header.body_bytes)) return false;
        ++shared_.counters.requests_total;
        return answer(header, received_ns, tenant);
    }

    bool read_header(FrameHeader& header) {
        auto* raw = reinterpret_cast<std::byte*>(&header);
        if (known_) return poll_until(fd_.get(), POLLIN, now_ns() + shared_.limits.idle_ns) && read_all(fd_.get(), raw, sizeof header, now_ns() + shared_.limits.stall_ns);
        const int64_t until = since_ns_ + shared_.limits.greet_ns;
        if (read_all(fd_.get(), raw, sizeof header, until)) return true;
        if (!yields_ && now_ns() < until) return false;  // it has left
        ++shared_.counters.cut_total;
        return send_away(0, Fault::refused, yields_ ? "the places for peers that have sent no request yet are all taken: send one as soon as you are connected"
                                                    : "no request came in time: send one as soon as you are connected");
    }

    // The peer is no stranger any more. False: there is no place.
    bool enter() noexcept {
        if (shared_.known.fetch_add(1) >= shared_.limits.connections_max) {
            --shared_.known;
            return false;
        }
        known_ = true;
        shared_.news.set();
        return true;
    }

    // The last word. What the peer still sends is not read as requests; unread, it would take our word back from it.
    bool send_away(uint64_t id, Fault fault, std::string_view text, const Verdict& verdict = {}) {
        if (!refuse(id, fault, text, verdict)) return false;
        ::shutdown(fd_.get(), SHUT_WR);
        std::byte scratch[4096];
        const int64_t until = now_ns() + LINGER_NS;
        for (uint64_t left = LINGER_BYTES; left > 0 && poll_until(fd_.get(), POLLIN, until);) {
            const ssize_t got = ::recv(fd_.get(), scratch, std::min<uint64_t>(left, sizeof scratch), 0);
            if (got <= 0) break;
            left -= static_cast<uint64_t>(got);
        }
        return false;
    }

    bool answer(const FrameHeader& header, int64_t received_ns, int32_t tenant) {
        const auto kind = static_cast<Kind>(header.kind);
        if (kind == Kind::ping && header.body_bytes == 0) return send_empty(header.request, Kind::pong);
        if (kind != Kind::gather && kind != Kind::lookup && kind != Kind::token_map)
            return refuse(header.request, Fault::invalid, "no such kind of request");
        if (shared_.draining) return refuse(header.request, Fault::unavailable, "draining");
        const auto request = std::make_shared<Request>();
        request->version = shared_.versions->find(header.version);
        if (!request->version) return refuse(header.request, Fault::not_found, "no such version");
        if (!same_digest(request->version->fingerprint, header.fingerprint)) return refuse(header.request, Fault::mismatch, "another fingerprint");
        if (kind == Kind::token_map) return send_token_map(header, *request->version);
        if (const Refusal refusal = read_request(*request, header, body_.get()))
            return refuse(header.request, refusal.fault, refusal.text);
        const std::string limit = std::to_string(shared_.limits.reply_bytes_max) + ", the limit socket_reply_bytes_max";
        if (request->reply_bytes > shared_.limits.reply_bytes_max)
            return refuse(header.request, Fault::invalid, "a reply of " + std::to_string(request->reply_bytes) + " bytes is more than " + limit +
                          ": ask for fewer rows at once, or raise it");
        if (!reserve(request->reply_bytes))
            return refuse(header.request, Fault::refused, "the replies in the works would be more than " + limit + ": try again in 0.005 s, or raise it",
                          {Fault::refused, 0, RETRY_NS});
        const bool alive = run_and_send(header, request, received_ns, tenant);
        shared_.reply_bytes -= request->reply_bytes;
        if (reply_size_ > KEPT_BYTES) reply_.reset(), reply_size_ = 0;
        return alive;
    }

    bool run_and_send(const FrameHeader& header, const std::shared_ptr<Request>& request, int64_t received_ns, int32_t tenant) {
        if (reply_size_ < request->reply_bytes) {
            reply_size_ = 0;
            reply_ = std::make_unique_for_overwrite<std::byte[]>(request->reply_bytes);
            reply_size_ = request->reply_bytes;
        }
        request->reply = reply_.get();
        const int64_t left = std::clamp(header.deadline_ns, -RELATIVE_NS_MAX, RELATIVE_NS_MAX);
        const int64_t deadline_ns = header.deadline_ns == NO_DEADLINE ? NO_DEADLINE : received_ns + left;
        const auto ticket = std::make_shared<Ticket>(request_job(request, shared_.piece_rows), deadline_ns, nullptr, tenant);
        if (const Verdict verdict = shared_.queue.submit(ticket); !verdict) return refuse(header.request, verdict.fault, "", verdict);
        allow_sending(request->reply_bytes);
        const bool alive = send_while_running(header.request, *request, ticket);
        if (!ticket->ended()) {  // the peer has gone; pieces in flight still write to our buffers
            shared_.queue.stop(ticket);
            while (!ticket->wait_until(now_ns() + shared_.limits.stall_ns)) {}
        }
        if (!alive) {
            ++shared_.counters.cut_total;
            return false;
        }
        if (ticket->state() == State::complete) {
            shared_.counters.rows_total += static_cast<uint64_t>(request->rows());
            return true;
        }
        const Fault fault = ticket->state() == State::failed ? ticket->fault : Fault::unavailable;
        return refuse(header.request, fault, "the rows could not be read");
    }

    // This thread takes pieces too, the earliest deadline's first, and sends what is ready whenever that fills a frame.
    bool send_while_running(uint64_t id, Request& request, const TicketRef& ticket) {
        uint64_t sent = 0;
        for (;;) {
            const bool ended = ticket->ended();
            if (ended && ticket->state() != State::complete) return true;  // the fault is told by the caller
            const uint64_t ready = request.ready_bytes();
            while (ready - sent >= PIECE_BYTES || (ended && sent < request.reply_bytes)) {
                const uint64_t count = std::min(PIECE_BYTES, ready - sent);
                if (!send_rows(id, request.reply + sent, sent, count, request.reply_bytes)) return false;
                sent += count;
            }
            if (ended) return request.reply_bytes > 0 || send_rows(id, nullptr, 0, 0, 0);
            if (const auto claim = shared_.queue.try_claim())
                run_claim(*claim);
            else
                ticket->wait_until(now_ns() + shared_.limits.stall_ns);  // all its pieces are with others
        }
    }

    void run_claim(const Claim& claim) {
        const int64_t start = now_ns();
        const Fault fault = claim.ticket->run(claim.first, claim.last);
        shared_.queue.finish(claim, now_ns() - start, fault);
    }

    bool send_token_map(const FrameHeader& header, const Version& version) {
        BodyReader body(body_.get(), header.body_bytes);
        const LayerAsk* ask = header.layer_count == 1 ? body.take<LayerAsk>(1) : nullptr;
        const Layer* layer = ask && body.empty() ? version.layer(ask->layer) : nullptr;
        if (!layer) return refuse(header.request, ask ? Fault::not_found : Fault::invalid, "no such layer");
        const auto& view = layer->plan->view;
        const uint64_t bytes = view.token_map ? static_cast<uint64_t>(view.token_map_size) * sizeof(int32_t) : 0;
        const auto* map = reinterpret_cast<const std::byte*>(view.token_map);
        allow_sending(bytes);
        for (uint64_t sent = 0; sent < bytes || bytes == 0; sent += PIECE_BYTES) {
            if (!send_rows(header.request, map + sent, sent, std::min(PIECE_BYTES, bytes - sent), bytes)) return false;
            if (bytes == 0) break;
        }
        return true;
    }

    bool send_rows(uint64_t id, const std::byte* rows, uint64_t offset, uint64_t count, uint64_t total) {
        FrameHeader header;
        header.kind = static_cast<uint16_t>(Kind::rows);
        header.request = id;
        header.body_bytes = count;
        header.offset = offset;
        header.total_bytes = total;
        const int64_t begun = now_ns();
        if (!send_frame(header, rows, std::min(shared_.limits.stall_ns, sending_left_ns_))) return false;
        sending_left_ns_ -= now_ns() - begun;
        shared_.counters.bytes_total += count;
        return true;
    }

    // How long the peer may keep us waiting in all the frames of a reply: its memory is taken from everybody else.
    void allow_sending(uint64_t bytes) noexcept {
        sending_left_ns_ = shared_.limits.stall_ns + static_cast<int64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(LEAST_BYTES_PER_SECOND));
    }

    bool send_empty(uint64_t id, Kind kind) {
        FrameHeader header;
        header.kind = static_cast<uint16_t>(kind);
        header.request = id;
        return send_frame(header, nullptr, shared_.limits.stall_ns);
    }

    bool refuse(uint64_t id, Fault fault, std::string_view text, const Verdict& verdict = {}) {
        ++shared_.counters.refused_total;
        FrameHeader header = fault_frame(id, fault, std::min<uint64_t>(text.size(), FAULT_TEXT_MAX));
        if (verdict.predicted_finish_ns > 0) header.deadline_ns = std::max<int64_t>(1, verdict.predicted_finish_ns - now_ns());
        header.retry_ns = verdict.retry_after_ns;
        header.layer_count = static_cast<uint32_t>(verdict.reason);
        return send_frame(header, reinterpret_cast<const std::byte*>(text.data()), shared_.limits.stall_ns);
    }

    bool send_frame(FrameHeader& header, const std::byte* body, int64_t within_ns) {
        iovec parts[2] = {{&header, sizeof header}, {const_cast<std::byte*>(body), header.body_bytes}};
        return write_all(fd_.get(), parts, header.body_bytes ? 2 : 1, now_ns() + within_ns);
    }

    bool read_body(uint64_t bytes) {
        for (uint64_t got = 0; got < bytes;) {
            const uint64_t step = std::min(bytes - got, std::max(GROWTH_BYTES, got));
            if (body_size_ < got + step) grow_body(got, got + step);
            if (!read_all(fd_.get(), body_.get() + got, step, now_ns() + shared_.limits.stall_ns)) return false;
            got += step;
        }
        if (body_size_ > KEPT_BYTES && bytes <= KEPT_BYTES) grow_body(bytes, std::max(bytes, GROWTH_BYTES));
        return true;
    }

    bool skip_body(uint64_t bytes) {
        std::byte scratch[4096];
        for (uint64_t left = bytes, step; left > 0; left -= step) {
            step = std::min<uint64_t>(left, sizeof scratch);
            if (!read_all(fd_.get(), scratch, step, now_ns() + shared_.limits.stall_ns)) return false;
        }
        return true;
    }

    void grow_body(uint64_t kept, uint64_t bytes) {
        auto grown = std::make_unique_for_overwrite<std::byte[]>(bytes);  // new[] aligns to 16 bytes
        if (kept > 0) std::memcpy(grown.get(), body_.get(), kept);
        body_ = std::move(grown);
        body_size_ = bytes;
    }

    bool reserve(uint64_t bytes) {
        const uint64_t before = shared_.reply_bytes.fetch_add(bytes);
        if (before <= shared_.limits.reply_bytes_max - bytes) return true;
        shared_.reply_bytes -= bytes;
        return false;
    }

    static constexpr std::string_view STRANGE = "show a token that this pool knows";

    SocketShared& shared_;
    const int64_t since_ns_ = now_ns();
    std::atomic<bool> known_{false}, yields_{false};
    std::mutex closing_;  // of fd_: others shut it down
    Descriptor fd_;
    int64_t sending_left_ns_ = 0;
    std::unique_ptr<std::byte[]> body_, reply_;
    uint64_t body_size_ = 0, reply_size_ = 0;
};

}  // namespace treadle::dataplane
