// A backend of torch.distributed for tests: NCCL's rules, on the CPU, carried by gloo.
//
// What NCCL refuses is refused, what it does not look at is not looked at, and what on a GPU would wait or give wrong
// numbers is an error here. A thread stands for the stream: a call returns when its operation is enqueued, operations
// run one after another, and the host waits in Work::wait(). Sources: torch's ProcessGroupNCCL.cpp and NCCLUtils.hpp,
// and NCCL's user guide, "Group Calls" and "Communicator Lifecycle".

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <functional>
#include <thread>

namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr int kAbortTag = 0x7ab047; // nobody sends such a message
constexpr int64_t kSignatureBytes = 128; // of an operation, as the ranks compare it

#define FAIL(Kind, ...) C10_THROW_ERROR(Kind, c10::str("NCCL's rules: ", __VA_ARGS__))

// The work of one call, or of one batch.
class RuleWork : public c10d::Work {
 public:
  RuleWork(int rank, OpType type, Tensors outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void end(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(ending_);
      if (ended_) {
        return; // by abort
      }
      ended_ = true;
    }
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

  Tensors result() override {
    return outputs_;
  }

  void synchronize() override {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex ending_;
  bool ended_ = false;
};

// A tensor that goes to a rank, or comes from it.
struct Message {
  Tensor tensor;
  int peer;
};

struct Operation {
  std::string signature; // empty for point to point, which the other ranks need not know of
  std::function<void()> run;
  std::vector<Message> sends, receives;
};

struct Batch {
  std::vector<Operation> operations;
  c10::intrusive_ptr<RuleWork> work;
};

Tensor bytesOf(const Tensor& tensor) {
  return tensor.view({-1}).view(at::kByte);
}

void wait(const WorkPtr& work) {
  work->wait();
}

// The stream of one communicator, which its thread keeps.
class Stream {
 public:
  Stream(BackendPtr gloo, int rank, int size)
      : gloo_(std::move(gloo)), rank_(rank), size_(size), sent_(size, 0), received_(size, 0) {}

  static void start(const std::shared_ptr<Stream>& stream) {
    std::thread([stream] { stream->loop(); }).detach();
  }

  void enqueue(Batch batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    refuseBroken();
    queue_.push_back(std::move(batch));
    changed_.notify_all();
  }

  // ncclCommDestroy, after all that is enqueued: blocks as long as another rank keeps that waiting.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return ended_; });
  }

  // ncclCommAbort: what is enqueued fails at once, and nothing is waited for.
  void abort() {
    std::deque<Batch> dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = ended_ = true;
      if (broken_.empty()) {
        broken_ = "the communicator was aborted";
      }
      dropped.swap(queue_);
      if (running_) {
        running_->end(error());
      }
      changed_.notify_all();
    }
    for (auto& batch : dropped) {
      batch.work->end(error());
    }
    try { // gloo closes its connections when any wait is too long, and so ends what the thread waits for
      Tensors nothing{at::empty({1})};
      if (size_ > 1) {
        gloo_->recv(nothing, (rank_ + 1) % size_, kAbortTag)->wait(std::chrono::milliseconds(1));
      }
    } catch (const std::exception&) { // it must be too late
    }
  }

  void refuseBroken() {
    if (!broken_.empty()) {
      FAIL(DistBackendError, broken_);
    }
  }

  // Exchange messages with other ranks: the n-th that goes to a rank is the n-th that it receives from here.
  void exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
    std::vector<WorkPtr> works;
    std::vector<Tensor> own;
    for (const auto& [tensor, peer] : sends) {
      if (peer == rank_) {
        own.push_back(tensor);
        continue;
      }
      Tensors header{at::full({1}, static_cast<int64_t>(tensor.nbytes()), at::kLong)};
      works.push_back(gloo_->send(header, peer, sent_[peer]++));
      if (tensor.nbytes()) {
        Tensors payload{tensor};
        works.push_back(gloo_->send(payload, peer, sent_[peer]++));
      }
    }
    std::string problem;
    size_t own_index = 0;
    for (const auto& [tensor, peer] : receives) {
      if (peer == rank_) {
        bytesOf(tensor).copy_(bytesOf(own.at(own_index++)));
        continue;
      }
      Tensors header{at::zeros({1}, at::kLong)};
      wait(gloo_->recv(header, peer, received_[peer]++));
      auto num_bytes = header[0].item<int64_t>();
      Tensors payload{tensor};
      if (num_bytes != static_cast<int64_t>(tensor.nbytes())) {
        problem = c10::str("rank ", peer, " sends ", num_bytes, " bytes, and rank ", rank_, " receives ", tensor.nbytes());
        payload[0] = at::empty({num_bytes}, at::kByte); // so that the sender ends
      }
      if (num_bytes) {
        works.push_back(gloo_->recv(payload, peer, received_[peer]++));
      }
    }
    for (const auto& work : works) {
      wait(work);
    }
    if (!problem.empty()) {
      FAIL(DistBackendError, problem);
    }
  }

 private:
  std::exception_ptr error() {
    try {
      refuseBroken();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void loop() {
    while (true) {
      Batch batch;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) {
          ended_ = true;
          changed_.notify_all();
          return;
        }
        batch = std::move(queue_.front());
        queue_.pop_front();
        running_ = batch.work;
      }
      std::exception_ptr problem;
      try {
        run(batch);
      } catch (const std::exception& exception) {
        problem = std::current_exception();
        std::lock_guard<std::mutex> lock(mutex_);
        if (broken_.empty()) { // NCCL's communicators do not survive an error
          broken_ = c10::str("the communicator is broken since: ", exception.what());
        }
      }
      auto work = batch.work;
      batch = {}; // before anybody learns that it is done
      {
        std::lock_guard<std::mutex> lock(mutex_);
        running_.reset();
        if (!problem && !broken_.empty()) {
          problem = error();
        }
      }
      work->end(problem);
    }
  }

  void run(const Batch& batch) {
    std::vector<Message> sends, receives;
    for (const auto& operation : batch.operations) {
      sends.insert(sends.end(), operation.sends.begin(), operation.sends.end());
      receives.insert(receives.end(), operation.receives.begin(), operation.receives.end());
    }
    exchange(sends, receives);
    for (const auto& operation : batch.operations) {
      if (!operation.signature.empty()) {
        compare(operation.signature);
        operation.run();
      }
    }
  }

  // All ranks must enqueue the same operations in the same order; on a GPU they would wait forever.
  void compare(const std::string& signature) {
    if (size_ == 1) {
      return;
    }
    auto mine = at::zeros({kSignatureBytes}, at::kByte);
    std::copy_n(signature.begin(), std::min<int64_t>(signature.size(), kSignatureBytes - 1), mine.mutable_data_ptr<uint8_t>());
    std::vector<Tensors> all(1);
    for (int rank = 0; rank < size_; ++rank) {
      all[0].push_back(at::empty_like(mine));
    }
    Tensors input{mine};
    wait(gloo_->allgather(all, input));
    for (int rank = 0; rank < size_; ++rank) {
      std::string theirs(reinterpret_cast<const char*>(all[0][rank].const_data_ptr<uint8_t>()));
      if (theirs != signature.substr(0, kSignatureBytes - 1)) {
        FAIL(DistBackendError, "all ranks must enqueue the same operations in the same order, got ", signature,
             " on rank ", rank_, " and ", theirs, " on rank ", rank);
      }
    }
  }

  BackendPtr gloo_;
  int rank_, size_;
  std::vector<int> sent_, received_; // so many messages to and from each rank: their numbers are gloo's tags
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> queue_;
  c10::intrusive_ptr<RuleWork> running_;
  std::string broken_;
  bool closing_ = false, ended_ = false;
};

class RuleBackend : public c10d::Backend {
 public:
  RuleBackend(BackendPtr gloo, int rank, int size)
      : Backend(rank, size), gloo_(gloo), stream_(std::make_shared<Stream>(gloo, rank, size)) {
    Stream::start(stream_);
  }

  ~RuleBackend() override {
    stream_->abort();
  }

  const std::string getBackendName() const override {
    return "nccl_rules";
  }

  bool supportsCoalescing() const override {
    return true;
  }

  void startCoalescing() override {
    is_coalescing_ = true;
  }

  // Nothing closes a batch but this: an exception within it leaves it open, and what follows is only collected.
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    auto operations = std::move(coalesced_);
    coalesced_.clear();
    if (operations.empty()) {
      return nullptr;
    }
    return launch(OpType::COALESCED, std::move(operations), {});
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto tensor = single(tensors);
    return collective(OpType::BROADCAST, describe("broadcast", tensor, opts.rootRank), {tensor}, [=, this] {
      auto inner = opts;
      Tensors bytes{bytesOf(tensor)};
      wait(gloo_->broadcast(bytes, inner));
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return allreduceAll(OpType::ALLREDUCE, {single(tensors)}, opts.reduceOp);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduceAll(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto tensor = single(tensors);
    checkReduction(tensor, opts.reduceOp);
    auto signature = describe("reduce", tensor, opts.rootRank, opName(opts.reduceOp));
    return collective(OpType::REDUCE, signature, {tensor}, [=, this] {
      auto total = reduced(tensor, opts.reduceOp);
      if (rank_ == opts.rootRank) {
        tensor.copy_(total);
      }
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto input = single(inputs);
    auto parts = list(outputs, input, "all_gather");
    return collective(OpType::ALLGATHER, describe("all_gather", input), parts, [=, this] { gatherAll(parts, input); });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return intoTensors(OpType::_ALLGATHER_BASE, {output}, {input});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return intoTensors(OpType::COALESCED, outputs, inputs);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto output = single(outputs);
    auto parts = list(inputs, output, "reduce_scatter");
    return scatterSums(OpType::REDUCE_SCATTER, {output}, {parts}, opts.reduceOp);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scatterSums(OpType::_REDUCE_SCATTER_BASE, {output}, {pieces(input, output)}, opts.reduceOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    std::vector<Tensors> parts;
    for (size_t index = 0; index < inputs.size(); ++index) {
      parts.push_back(pieces(inputs[index], outputs[index]));
    }
    return scatterSums(OpType::_REDUCE_SCATTER_BASE, outputs, parts, opts.reduceOp);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto input = single(inputs);
    auto root = static_cast<int>(opts.rootRank);
    auto parts = rank_ == root ? list(outputs, input, "gather") : Tensors{};
    return collective(OpType::GATHER, describe("gather", input, root), parts, [=, this] {
      stream_->exchange({{input, root}}, messages(parts));
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto output = single(outputs);
    auto root = static_cast<int>(opts.rootRank);
    auto parts = rank_ == root ? list(inputs, output, "scatter") : Tensors{};
    return collective(OpType::SCATTER, describe("scatter", output, root), {output}, [=, this] {
      stream_->exchange(messages(parts), {{output, root}});
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    for (const auto& tensor : outputs) {
      check(tensor);
    }
    for (const auto& tensor : inputs) {
      check(tensor);
    }
    auto to = outputs, from = inputs;
    return collective(OpType::ALLTOALL, "all_to_all", outputs, [=, this] { stream_->exchange(messages(from), messages(to)); });
  }

  WorkPtr alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions&) override {
    check(output);
    check(input);
    auto to = split(output, output_sizes), from = split(input, input_sizes);
    return collective(
        OpType::ALLTOALL_BASE, "all_to_all_single", {output}, [=, this] { stream_->exchange(messages(from), messages(to)); });
  }

  WorkPtr send(Tensors& tensors, int peer, int) override {
    return pointToPoint({"", {}, {{single(tensors), peer}}, {}});
  }

  WorkPtr recv(Tensors& tensors, int peer, int) override {
    return pointToPoint({"", {}, {}, {{single(tensors), peer}}});
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return collective(OpType::BARRIER, "barrier", {}, [] {});
  }

  void shutdown() override {
    stream_->finish();
  }

  void abort() override {
    stream_->abort();
  }

 private:
  static void check(const Tensor& tensor) {
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      FAIL(ValueError, "tensors must be dense and on the device of the communicator");
    }
    if (!tensor.is_contiguous()) {
      FAIL(ValueError, "tensors must be contiguous, got strides ", tensor.strides()); // point to point: sent as they lie
    }
    switch (tensor.scalar_type()) { // those of NCCLUtils.hpp but float8, which gloo cannot add
      case at::kChar:
      case at::kByte:
      case at::kFloat:
      case at::kDouble:
      case at::kInt:
      case at::kLong:
      case at::kHalf:
      case at::kBool:
      case at::kBFloat16:
        return;
      default:
        FAIL(TypeError, "there is no data type for ", tensor.scalar_type());
    }
  }

  static Tensor single(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "NCCL's rules: one tensor for each rank");
    check(tensors[0]);
    return tensors[0];
  }

  Tensors list(const std::vector<Tensors>& tensors, const Tensor& like, const char* name) const {
    TORCH_CHECK(tensors.size() == 1 && static_cast<int>(tensors[0].size()) == size_, name, " needs a tensor for each rank");
    for (const auto& tensor : tensors[0]) {
      check(tensor);
      if (tensor.numel() != like.numel() || tensor.scalar_type() != like.scalar_type()) {
        FAIL(ValueError, name, " moves as much between all ranks, got ", tensor.sizes(), " beside ", like.sizes());
      }
    }
    return tensors[0];
  }

  Tensors pieces(const Tensor& whole, const Tensor& part) const {
    check(whole);
    check(part);
    if (whole.numel() != part.numel() * size_ || whole.scalar_type() != part.scalar_type()) {
      FAIL(ValueError, "the larger tensor must be as large as those of all ranks, got ", whole.sizes(), " and ", part.sizes());
    }
    return whole.view({size_, part.numel()}).unbind();
  }

  Tensors split(const Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) {
      return tensor.split_with_sizes(sizes);
    }
    if (tensor.size(0) % size_) {
      FAIL(ValueError, "tensors must be divisible by the number of ranks, got ", tensor.sizes());
    }
    return tensor.tensor_split(size_);
  }

  static std::vector<Message> messages(const Tensors& tensors) {
    std::vector<Message> found;
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      found.push_back({tensors[rank], static_cast<int>(rank)});
    }
    return found;
  }

  template <typename... Details>
  static std::string describe(const char* name, const Tensor& tensor, const Details&... details) {
    std::string text = c10::str(name, " of ", tensor.numel(), " ", tensor.scalar_type());
    ((text += c10::str(" ", details)), ...);
    return text;
  }

  static std::string opName(const c10d::ReduceOp& op) {
    return c10::str("by ", static_cast<int>(op.op_));
  }

  static void checkReduction(const Tensor& tensor, const c10d::ReduceOp& op) {
    check(tensor);
    auto is_sum = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG;
    if (!is_sum && op != c10d::ReduceOp::MIN && op != c10d::ReduceOp::MAX && op != c10d::ReduceOp::PRODUCT) {
      FAIL(ValueError, "there is no reduction ", opName(op));
    }
    if (is_sum && tensor.scalar_type() == at::kBool) {
      FAIL(ValueError, "a sum of bool is their maximum"); // NCCL calculates that, without a word
    }
  }

  Tensor reduced(const Tensor& tensor, const c10d::ReduceOp& op) const {
    auto total = tensor.scalar_type() == at::kBool ? tensor.to(at::kByte) : tensor.clone();
    if (total.numel() && size_ > 1) {
      c10d::AllreduceOptions options;
      options.reduceOp = op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
      Tensors inner{total};
      wait(gloo_->allreduce(inner, options));
    }
    return op == c10d::ReduceOp::AVG ? total.div(size_).to(tensor.scalar_type()) : total;
  }

  WorkPtr allreduceAll(OpType type, const Tensors& tensors, const c10d::ReduceOp& op) {
    std::string signature = "all_reduce";
    for (const auto& tensor : tensors) {
      checkReduction(tensor, op);
      signature += describe(",", tensor, opName(op));
    }
    auto all = tensors;
    return collective(type, signature, tensors, [=, this] {
      for (const auto& tensor : all) {
        tensor.copy_(reduced(tensor, op));
      }
    });
  }

  void gatherAll(const Tensors& parts, const Tensor& input) const {
    std::vector<Tensors> outputs(1);
    for (const auto& part : parts) {
      outputs[0].push_back(at::empty({static_cast<int64_t>(part.nbytes())}, at::kByte));
    }
    Tensors inputs{bytesOf(input)};
    if (input.numel()) {
      wait(gloo_->allgather(outputs, inputs));
    }
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      bytesOf(parts[rank]).copy_(outputs[0][rank]);
    }
  }

  WorkPtr intoTensors(OpType type, const Tensors& outputs, const Tensors& inputs) {
    std::string signature = "all_gather_into_tensor";
    std::vector<Tensors> parts;
    for (size_t index = 0; index < inputs.size(); ++index) {
      parts.push_back(pieces(outputs[index], inputs[index]));
      signature += describe(",", inputs[index]);
    }
    auto from = inputs;
    return collective(type, signature, outputs, [=, this] {
      for (size_t index = 0; index < from.size(); ++index) {
        gatherAll(parts[index], from[index]);
      }
    });
  }

  WorkPtr scatterSums(
      OpType type, const Tensors& outputs, const std::vector<Tensors>& parts, const c10d::ReduceOp& op) {
    std::string signature = "reduce_scatter";
    for (const auto& output : outputs) {
      checkReduction(output, op);
      signature += describe(",", output, opName(op));
    }
    auto to = outputs;
    return collective(type, signature, outputs, [=, this] {
      for (size_t index = 0; index < to.size(); ++index) {
        to[index].copy_(reduced(at::stack(parts[index]), op)[rank_].view_as(to[index]));
      }
    });
  }

  WorkPtr collective(OpType type, std::string signature, Tensors outputs, std::function<void()> run) {
    is_connected_ = true;
    Operation operation{std::move(signature), std::move(run), {}, {}};
    if (is_coalescing_) {
      coalesced_.push_back(std::move(operation));
      return nullptr;
    }
    std::vector<Operation> operations;
    operations.push_back(std::move(operation));
    return launch(type, std::move(operations), std::move(outputs));
  }

  WorkPtr pointToPoint(Operation operation) {
    if (!is_connected_) {
      FAIL(DistBackendError, "the first operation of a communicator must be one in which all its ranks take part");
    }
    if (!is_coalescing_) {
      FAIL(DistBackendError, "point to point must be in a batch: two ranks that send to each other would wait forever");
    }
    coalesced_.push_back(std::move(operation));
    return nullptr;
  }

  WorkPtr launch(OpType type, std::vector<Operation> operations, Tensors outputs) {
    auto work = c10::make_intrusive<RuleWork>(rank_, type, std::move(outputs));
    stream_->enqueue({std::move(operations), work});
    return work;
  }

  BackendPtr gloo_;
  std::shared_ptr<Stream> stream_;
  bool is_coalescing_ = false, is_connected_ = false;
  std::vector<Operation> coalesced_;
};

} // namespace

PYBIND11_MODULE(nccl_rules_backend, module) {
  module.def(
      "make",
      [](BackendPtr gloo, int rank, int size) -> BackendPtr {
        return c10::make_intrusive<RuleBackend>(std::move(gloo), rank, size);
      },
      "Return a backend with NCCL's rules over one of gloo.");
}
